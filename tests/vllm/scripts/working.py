"""Let the core of a guarded engine die at work in one of several ways, and tell what its caller got and what is left."""

import asyncio
import json
import os
import signal
import sys
import threading
import time

import psutil
from guarded import left, segments, shown

import oomguard

SMALL = {
    "model": "./tiny",
    "max_model_len": 512,
    "kv_cache_memory_bytes": 16_000_000,
    "enforce_eager": True,
    "dtype": "float32",
}
PROMPTS = [f"prompt number {number} " * (1 + number % 4) for number in range(40)]
MOST_TOKENS = 48


def kill_core() -> None:
    """As the kernel does where memory runs out."""
    core = next(c for c in psutil.Process().children() if "tracker" not in " ".join(c.cmdline()))
    os.kill(core.pid, signal.SIGKILL)


def sampling(number: int) -> object:
    """Greedy; every third request draws with a seed and a penalty, which no engine can go on with in the middle."""
    from vllm import SamplingParams

    drawn = (
        {"temperature": 1.0, "seed": number, "presence_penalty": 0.5}
        if number % 3 == 0
        else {"temperature": 0.0}
    )
    return SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True, **drawn)


def generate(llm: object, prompts: list[object]) -> list[list[object]]:
    outputs = llm.generate(prompts, [sampling(n) for n in range(len(prompts))], use_tqdm=False)
    return [
        [list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.outputs[0].stop_reason]
        for o in outputs
    ]


def killed() -> dict[str, object]:
    """A batch whose core is killed in its middle."""
    from vllm import LLM

    # No name for the engine here: an exception that vLLM keeps of its own imports keeps this frame.
    with oomguard.guard(restart=True) as guard:
        return {"equal": equal_outputs(LLM(**SMALL)), "attempts": shown(guard)}


def equal_outputs(llm: object) -> int:
    """Return how many outputs of a batch are the same after the core was killed."""
    began = time.monotonic()
    calm = generate(llm, PROMPTS)
    threading.Timer((time.monotonic() - began) / 2, kill_core).start()
    return sum(a == b for a, b in zip(calm, generate(llm, PROMPTS), strict=True))


async def streams() -> dict[str, object]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with oomguard.guard(restart=True) as guard:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SMALL))

    async def stream(number: int, name: str) -> list[int]:
        had: list[int] = []
        async for output in engine.generate(
            PROMPTS[number], sampling(number), request_id=f"{name}{number}"
        ):
            now = list(output.outputs[0].token_ids)
            assert now[: len(had)] == had, "what was delivered has changed"
            had = now
        return had

    async def kill(after_s: float) -> None:
        await asyncio.sleep(after_s)
        kill_core()

    began = time.monotonic()
    calm = await asyncio.gather(*[stream(number, "calm") for number in range(len(PROMPTS))])
    *found, _ = await asyncio.gather(
        *[stream(number, "killed") for number in range(len(PROMPTS))],
        kill((time.monotonic() - began) / 2),
    )
    later = await stream(1, "later")
    engine.shutdown()
    return {
        "equal": sum(a == b for a, b in zip(calm, found, strict=True)),
        "later": later == calm[1],
        "attempts": shown(guard),
    }


def interrupted() -> dict[str, object]:
    """Ctrl-C while the core is made again."""
    pressed: list[float] = []

    async def stream() -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with oomguard.guard(restart=True):
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SMALL))
        async for _ in engine.generate(PROMPTS[0], sampling(1), request_id="one"):
            if not pressed:
                kill_core()
                pressed.append(0.0)
                threading.Timer(4.0, press).start()

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    try:
        asyncio.run(stream())
    except KeyboardInterrupt:
        return {"interrupted": True, "after_s": time.monotonic() - pressed[-1]}
    return {"interrupted": False}


def main(way: str) -> None:
    before = segments()
    ways = {"killed": killed, "streams": lambda: asyncio.run(streams()), "interrupted": interrupted}
    told = ways[way]()
    print("RESULT", json.dumps(told | {"left": left(before)}))


if __name__ == "__main__":
    main(sys.argv[1])
