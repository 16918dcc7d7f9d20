"""Commands that benchmarks run and time."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode


def oomguard_command() -> list[str]:
    """Return the command as a user starts it: the script beside this Python, else the module."""
    beside = Path(sys.executable).with_name("oomguard")
    if beside.is_file():
        return [str(beside)]
    return [sys.executable, "-m", "oomguard"]


def seconds(command: list[str], env: Mapping[str, str] | None = None) -> float:
    """Run a command that has to succeed and return how long it took; its output is dropped."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    return time.perf_counter() - began


def processor_seconds(command: list[str], env: Mapping[str, str] | None = None) -> float:
    """Run a command that has to succeed and return the processor time that it took: other work on
    the machine does not lengthen it.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds(command, env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def of_checkout(checkout: Path, cache: Path) -> dict[str, str]:
    """Return the environment in which ``python -P -m oomguard`` is this checkout's, with a cache of
    its own.
    """
    return {**os.environ, "PYTHONPATH": str(checkout.resolve()), "XDG_CACHE_HOME": str(cache)}
