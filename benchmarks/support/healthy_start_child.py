"""Run in the vLLM environment by guarded_starts.py: one start that needs no help, under a guard; tells what the guard did and took."""

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from vllm import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

import oomguard

PROMPTS, TOKENS = 24, 12
Batch = Callable[[], int]
took = {"engine": 0.0, "call": 0.0, "guard": 0.0}


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Count the seconds of a call under a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took[name] += time.perf_counter() - began

    call.__wrapped__ = function  # type: ignore[attr-defined]  # what reads its signature sees the engine's own
    return call


def params(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, **more)


def prompts() -> list[str]:
    return [f"question {number}" for number in range(PROMPTS)]


def by_llm(settings: dict[str, Any], kind: type = LLM) -> Batch:
    llm = kind(**settings)
    return lambda: sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts(), params(), use_tqdm=False))


class HouseLLM(LLM):
    """A subclass, as programs have them."""

    def __init__(self, model: str, **settings: Any) -> None:
        super().__init__(model, **{"seed": 7, **settings})


def by_engine(settings: dict[str, Any]) -> Batch:
    engine = LLMEngine.from_engine_args(EngineArgs(**settings))

    def batch() -> int:
        for number, text in enumerate(prompts()):
            engine.add_request(str(number), text, params(output_kind=RequestOutputKind.FINAL_ONLY))
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(o.outputs[0].token_ids) for o in engine.step() if o.finished)
        return tokens

    return batch


def by_async(settings: dict[str, Any]) -> Batch:
    loop = asyncio.new_event_loop()

    async def make() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    engine = loop.run_until_complete(make())

    async def ask(number: int, text: str) -> int:
        tokens = 0
        async for output in engine.generate(text, params(output_kind=RequestOutputKind.DELTA), str(number)):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    async def ask_all() -> int:
        return sum(await asyncio.gather(*(ask(number, text) for number, text in enumerate(prompts()))))

    def batch() -> int:
        tokens = loop.run_until_complete(ask_all())
        engine.shutdown()
        return tokens

    return batch


FRONT_ENDS: dict[str, Callable[[dict[str, Any]], Batch]] = {
    "LLM": by_llm,
    "subclass": lambda settings: by_llm(settings, HouseLLM),
    "LLMEngine": by_engine,
    "AsyncLLM": by_async,
}


class Lines(logging.Handler):
    """Keeps what oomguard logs, and is no handler of the user's: warnings still reach the stream too."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def main(front_end: str, settings: dict[str, Any], given: dict[str, Any]) -> None:
    for owner, name in ((LLMEngine, "from_engine_args"), (AsyncLLM, "from_engine_args")):
        setattr(owner, name, classmethod(timed(owner.__dict__[name].__func__, "engine")))
    lines = Lines()
    logging.getLogger("oomguard").addHandler(lines)
    began = time.perf_counter()
    guard = oomguard.guard(**given)
    with contextlib.ExitStack() as stack:
        stack.enter_context(guard)
        took["guard"] = time.perf_counter() - began
        for owner in (LLMEngine, AsyncLLM):
            owner.from_engine_args = staticmethod(timed(owner.from_engine_args, "call"))
        batch = FRONT_ENDS[front_end](settings)
        began = time.perf_counter()
    took["guard"] += time.perf_counter() - began
    tokens = batch()
    own = took["guard"] + took["call"] - took["engine"]
    changed = [f"{p.setting} {p.old} -> {p.new}" for a in guard.attempts for p in a.patches]
    failed = [str(a.error or a.incident) for a in guard.attempts if a.error or a.incident]
    children = len(psutil.Process().children(recursive=True))
    told = {"tokens": tokens, "wanted": PROMPTS * TOKENS, "own_s": own, "changed": changed, "failed": failed}
    print("RESULT", json.dumps(told | {"told": lines.told, "children": children}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
