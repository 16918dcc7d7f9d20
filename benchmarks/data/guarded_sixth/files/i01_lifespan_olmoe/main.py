"""The engine of a small web service, opened and closed by its lifespan; the server itself is left
out here.
"""

import asyncio
import contextlib
import types
import uuid

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


@contextlib.asynccontextmanager
async def lifespan(app):
    with oomguard.guard():
        app.state.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model="./experts",
                dtype="float16",
                load_format="dummy",
                enforce_eager=True,
                max_num_seqs=12,
                max_num_batched_tokens=1024,
                kv_cache_memory_bytes=13_000_000,
            )
        )
    try:
        yield
    finally:
        app.state.engine.shutdown()


async def completions(app, body):
    """POST /v1/completions"""
    sampling = SamplingParams(max_tokens=body["max_tokens"], temperature=0.8, ignore_eos=True)
    final = None
    async for final in app.state.engine.generate(body["prompt"], sampling, f"cmpl-{uuid.uuid4().hex}"):
        pass
    choice = final.outputs[0]
    return {"prompt": final.prompt, "usage": len(choice.token_ids), "finish_reason": choice.finish_reason}


async def main():
    app = types.SimpleNamespace(state=types.SimpleNamespace())
    async with lifespan(app):
        bodies = [{"prompt": "a letter to " + "x" * n, "max_tokens": 3 + n} for n in range(9)]
        answers = await asyncio.gather(*(completions(app, body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            assert answer["prompt"] == body["prompt"]
            assert answer["usage"] == body["max_tokens"] and answer["finish_reason"] == "length", answer
        config = app.state.engine.vllm_config
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
        print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
        print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
