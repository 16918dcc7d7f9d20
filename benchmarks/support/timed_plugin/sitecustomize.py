"""Put on PYTHONPATH by guarded_starts.py: each process of vLLM writes down how long oomguard's plugin takes in it."""

import os
import time
from importlib import metadata
from pathlib import Path

_TOLD = os.environ.get("PLUGIN_TOLD")


def _timed(entry, load=metadata.EntryPoint.load):
    if entry.name != "oomguard":
        return load(entry)
    began = time.perf_counter()
    register = load(entry)
    loaded_s = time.perf_counter() - began

    def call():
        again = time.perf_counter()
        try:
            return register()
        finally:
            with Path(_TOLD).open("a", encoding="utf-8") as out:
                out.write(f"{os.getpid()} {loaded_s + time.perf_counter() - again}\n")

    return call


if _TOLD:
    metadata.EntryPoint.load = _timed
