import asyncio
import contextlib
import types

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


@contextlib.asynccontextmanager
async def lifespan(app):
    args = AsyncEngineArgs(
        model="./gem",
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=32_000,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=72_000_000,
        max_num_seqs=6,
    )
    with oomguard.guard(allow="reduces-capacity"):
        app.state.engine = AsyncLLM.from_engine_args(args)
    yield
    app.state.engine.shutdown()


async def handle(app, text):
    pieces = 0
    async for output in app.state.engine.generate(text, SamplingParams(max_tokens=9, ignore_eos=True), f"req-{hash(text)}"):
        pieces = len(output.outputs[0].token_ids)
    return pieces


async def main():
    app = types.SimpleNamespace(state=types.SimpleNamespace())
    async with lifespan(app):
        print("answers", await asyncio.gather(*(handle(app, f"Tell me about {topic}.") for topic in ("rain", "snow", "fog"))))
        config = app.state.engine.vllm_config
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
        print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
