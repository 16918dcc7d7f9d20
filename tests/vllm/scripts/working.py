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

    drawn = {"temperature": 1.0, "seed": number, "presence_penalty": 0.5} if number % 3 == 0 else {"temperature": 0.0}
    return SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True, **drawn)


def generate(llm: object, prompts: list[object]) -> list[list[object]]:
    outputs = llm.generate(prompts, [sampling(n) for n in range(len(prompts))], use_tqdm=False)
    return [[list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.outputs[0].stop_reason] for o in outputs]


def sync(way: str) -> dict[str, object]:
    from vllm import LLM

    guard = oomguard.guard(restart=way == "killed")  # for memory it is made again without a word
    # No name for the engine here: an exception that vLLM keeps of its own imports keeps this frame.
    with guard:
        if way != "refused":
            return worked(way, LLM(**SMALL), guard)
        made = [LLM(**SMALL)]
    return worked(way, made.pop(), guard)


def worked(way: str, llm: object, guard: oomguard.Guard) -> dict[str, object]:
    began = time.monotonic()
    calm = generate(llm, PROMPTS)
    took, killed = time.monotonic() - began, []
    told: dict[str, object] = {}
    if way == "poison":
        poisoned = [
            {"prompt_token_ids": [int(os.environ["DYING_TOKEN"]), 9, 9]} if n == 7 else p for n, p in enumerate(PROMPTS)
        ]
        found = generate(llm, poisoned)
        told["failed"] = [n for n, row in enumerate(found) if row[1] == "error"]
        told["why"] = found[7][2]
        calm[7] = found[7]
    else:
        threading.Timer(took / 2, lambda: (killed.append(time.monotonic()), kill_core())).start()
        try:
            found = generate(llm, PROMPTS)
        except Exception as error:  # noqa: BLE001 - told
            found = []
            told |= {"raised": type(error).__name__, "after_s": time.monotonic() - killed[0]}
    return told | {"equal": sum(a == b for a, b in zip(calm, found, strict=False)), "attempts": shown(guard)}


def vectors() -> dict[str, object]:
    """Embed and score while the core is killed; then embed with one text that no engine survives."""
    from vllm import LLM

    with oomguard.guard(restart=True) as guard:
        llm = LLM(**SMALL, runner="pooling", convert="embed")

    def embed(prompts: list[object]) -> list[list[float]]:
        return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]

    def score() -> list[float]:
        return [output.outputs.score for output in llm.score(PROMPTS[0], PROMPTS * 20, use_tqdm=False)]

    told: dict[str, object] = {}
    for name, call in (("embed", lambda: embed(PROMPTS * 40)), ("score", score)):
        began = time.monotonic()
        calm = call()
        threading.Timer((time.monotonic() - began) / 2, kill_core).start()
        told[name] = near(calm, call())
    told["attempts"] = shown(guard)
    calm = embed(PROMPTS)
    poisoned = [
        {"prompt_token_ids": [int(os.environ["DYING_TOKEN"]), 9]} if n == 7 else p for n, p in enumerate(PROMPTS)
    ]
    try:
        embed(poisoned)
    except Exception as error:  # noqa: BLE001 - told
        had = error.partial.result
        told["missing"] = [n for n, one in enumerate(had) if one is None]
        told["partial"] = near(
            [one for n, one in enumerate(calm) if n != 7], [one.tolist() for one in had if one is not None]
        )
    return told


def near(calm: list[object], found: list[object]) -> bool:
    """Whether vectors or numbers are the same to the last bits, as many and in the same order."""
    import torch

    one, other = torch.tensor(calm), torch.tensor(found)
    return one.shape == other.shape and torch.allclose(one, other, atol=1e-5)


def methods() -> dict[str, object]:
    """Chat and search by beams while the core is killed."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import BeamSearchParams

    with oomguard.guard(restart=True) as guard:
        llm = LLM(**SMALL)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS * 3]
    params = SamplingParams(max_tokens=MOST_TOKENS, temperature=0, ignore_eos=True)

    def chat() -> list[object]:
        outputs = llm.chat(talks, params, use_tqdm=False, chat_template=template)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def beams() -> list[object]:
        found = llm.beam_search(
            [{"prompt": prompt} for prompt in PROMPTS[:8]],
            BeamSearchParams(beam_width=2, max_tokens=MOST_TOKENS, ignore_eos=True),
        )
        return [[list(one.tokens) for one in output.sequences] for output in found]

    told: dict[str, object] = {}
    for name, call in (("chat", chat), ("beams", beams)):
        call()  # the first one is slower
        began = time.monotonic()
        calm = call()
        threading.Timer((time.monotonic() - began) / 3, kill_core).start()
        told[name] = calm == call()
    return told | {"attempts": shown(guard)}


async def streams() -> dict[str, object]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with oomguard.guard(restart=True) as guard:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SMALL))

    async def stream(number: int, name: str) -> list[int]:
        had: list[int] = []
        async for output in engine.generate(PROMPTS[number], sampling(number), request_id=f"{name}{number}"):
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
        *[stream(number, "killed") for number in range(len(PROMPTS))], kill((time.monotonic() - began) / 2)
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
    ways = {
        "streams": lambda: asyncio.run(streams()),
        "interrupted": interrupted,
        "vectors": vectors,
        "methods": methods,
    }
    told = ways.get(way, lambda: sync(way))()
    print("RESULT", json.dumps(told | {"left": left(before)}))


if __name__ == "__main__":
    main(sys.argv[1])
