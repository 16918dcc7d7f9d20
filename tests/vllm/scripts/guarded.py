"""Start the engine under a guard in one of the ways of a user's script, use it, and tell what happened and what is left."""

import asyncio
import contextlib
import gc
import json
import re
import sys
import threading
import time
from pathlib import Path

import psutil

import oomguard

SMALL = {
    "max_model_len": 32768,
    "kv_cache_memory_bytes": 1_000_000,
    "enforce_eager": True,
    "dtype": "float16",
}


def segments() -> set[str]:
    """The shared memory that no process has mapped: an engine that lives has its own. A semaphore is mapped under another name."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= set(re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
    found = set()
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if str(path.stat().st_ino) not in mapped:
                found.add(path.name)
    return found


def left(before: set[str]) -> dict[str, list[str]]:
    """What is still there of the engines: for a moment their processes end by themselves."""
    gc.collect()
    until = time.monotonic() + 10
    while True:
        children = psutil.Process().children(recursive=True)
        alive = [
            c.name() for c in children if c.status() != psutil.STATUS_ZOMBIE and "VLLM" in c.name()
        ]
        threads = [t.name for t in threading.enumerate() if "oomguard" in t.name]
        if not (alive or threads) or time.monotonic() > until:
            return {"processes": alive, "segments": sorted(segments() - before), "threads": threads}
        time.sleep(0.1)


def shown(guard: oomguard.Guard) -> list[object]:
    return [
        [[f"{p.setting} {p.old} -> {p.new}" for p in a.patches], a.error] for a in guard.attempts
    ]


def start(way: str) -> object:
    from vllm import LLM

    return LLM("./tiny", **(SMALL | {"max_model_len": 1024} if way == "healthy" else SMALL))


async def answer() -> tuple[list[int], int]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs("./tiny", **SMALL))
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    try:
        async for output in engine.generate("the quick brown", sampling, request_id="1"):
            last = output
        return [len(last.outputs[0].token_ids)], engine.model_config.max_model_len
    finally:
        engine.shutdown()


def main(way: str) -> None:
    before = segments()
    if way == "async":
        told = []
        asked = oomguard.guard(
            allow="reduces-capacity", on_patch=lambda patch: told.append(patch.setting)
        )
        tokens, length = asyncio.run(asked(answer)())
        print("RESULT", json.dumps([tokens, length, ["first", *told], left(before)]))
        return
    guard = oomguard.guard(allow=None if way == "nothing-left" else "reduces-capacity")
    if way == "nothing-left":
        try:
            with guard:
                start("llm")
        except RuntimeError as error:
            told = [type(error).__name__, str(error), error.__notes__]
        print("RESULT", json.dumps([*told, shown(guard), left(before)]))
        return
    with guard:
        made = start(way)
    of_the_failed = (
        segments() - before
    )  # those of the engine that works are mapped; what that one leaves is vLLM's own
    engine = getattr(made, "llm_engine", made)
    length, tokens = engine.model_config.max_model_len, []
    if way == "llm":
        from vllm import SamplingParams

        outputs = made.generate(
            ["the quick brown", "the lazy dog"], SamplingParams(max_tokens=8, ignore_eos=True)
        )
        tokens = [len(output.outputs[0].token_ids) for output in outputs]
        del outputs
    del made, engine
    told = left(before) | {"segments": sorted(of_the_failed)}
    print("RESULT", json.dumps([tokens, length, shown(guard), told]))


if __name__ == "__main__":
    main(sys.argv[1])
