import asyncio
import contextlib

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


class App:
    """What a web framework calls before its first and after its last request."""

    def __init__(self, lifespan):
        self.lifespan, self.state = lifespan, {}

    async def run(self, client):
        async with self.lifespan(self):
            await client(self)


@contextlib.asynccontextmanager
async def lifespan(app):
    args = AsyncEngineArgs(
        model="./mixed",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=32768,
        max_num_seqs=32,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=10_900_000,
    )
    with oomguard.guard():
        app.state["engine"] = AsyncLLM.from_engine_args(args)
    yield
    app.state["engine"].shutdown()


async def one(engine, number):
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    async for output in engine.generate(f"question {number}", sampling, request_id=f"r{number}"):
        last = output
    return len(last.outputs[0].token_ids)


async def client(app):
    engine = app.state["engine"]
    print("tokens", await asyncio.gather(*(one(engine, n) for n in range(4))))
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(App(lifespan).run(client))
    print("INPROC-DONE")
