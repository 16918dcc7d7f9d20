import asyncio
import resource

from vllm import AsyncEngineArgs, PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard

MIB = 2**20


class Embedder:
    def __init__(self, engine, parallel):
        self.engine = engine
        self.gate = asyncio.Semaphore(parallel)

    async def __call__(self, name, tokens):
        async with self.gate:
            last = None
            async for last in self.engine.encode({"prompt_token_ids": tokens}, PoolingParams(task="embed"), name):
                pass
        return last.request_id, last.outputs.data


async def main():
    with oomguard.guard():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model="./vectors",
                runner="pooling",
                convert="embed",
                dtype="float16",
                load_format="dummy",
                enforce_eager=True,
                max_model_len=6000,
                max_num_seqs=4,
                max_num_batched_tokens=6144,
                kv_cache_memory_bytes=20_000_000,
                enable_prefix_caching=False,
            )
        )
    embed = Embedder(engine, parallel=3)
    lengths = [30, 12, 77, 5800, 64, 9]  # the fourth is a whole chapter
    texts = {f"t{n}": [5 + (n * 41 + i) % 1500 for i in range(size)] for n, size in enumerate(lengths)}
    results = dict(await asyncio.gather(*(embed(name, tokens) for name, tokens in texts.items())))
    assert set(results) == set(texts)
    for vector in results.values():
        assert vector.shape == (128,) and abs(float((vector.float() ** 2).sum()) - 1) < 0.05, vector.shape
    _, again = await embed("again", texts["t2"])
    assert float((again.float() - results["t2"].float()).abs().max()) < 0.02
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (3000 * MIB, 3000 * MIB))
    asyncio.run(main())
    print("INPROC-DONE")
