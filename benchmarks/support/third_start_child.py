"""Run in the vLLM environment by third_start.py: three starts in one process, each after a failure; tells what each has left."""

import contextlib
import ctypes
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from vllm import LLM, SamplingParams

import oomguard


def left() -> dict[str, Any]:
    """Count what belongs to this process, once its caches are emptied."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    own = psutil.Process()
    return {
        "processes": len(own.children(recursive=True)),
        "segments": len(list(Path("/dev/shm").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "resident_bytes": own.memory_info().rss,
        "folders": len([p for p in Path(os.environ["TMPDIR"]).iterdir() if p.name.startswith("oomguard")]),
    }


def once(model: str) -> int:
    """Start an engine that fails at first, use it, and end it."""
    with oomguard.guard(allow="reduces-capacity") as guard:
        llm = LLM(
            model,
            dtype="float16",
            enforce_eager=True,
            kv_cache_memory_bytes=1_000_000,
            max_model_len=32768,
            max_num_seqs=8,
        )
    llm.generate(["hello"] * 8, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return len(guard.attempts)


def main(model: str, starts: int) -> None:
    for _ in range(starts):
        attempts = once(model)
        print("ROW", json.dumps({"attempts": attempts, **left()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
