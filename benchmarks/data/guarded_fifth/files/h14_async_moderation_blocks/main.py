"""Moderates comments as they come: a classifier behind a queue."""

import asyncio
from contextlib import AsyncExitStack

from vllm import AsyncEngineArgs, PoolingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def moderator(engine, comments, verdicts):
    while (comment := await comments.get()) is not None:
        number, text = comment
        async for output in engine.encode(text, PoolingParams(task="classify"), f"comment-{number}"):
            verdicts[number] = output.outputs.data.tolist()


async def main():
    args = AsyncEngineArgs(
        model="./moderator",
        runner="pooling",
        max_model_len=4096,
        max_num_seqs=8,
        num_gpu_blocks_override=20,
        kv_cache_memory_bytes=30_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(oomguard.guard(pin=("max_model_len",)))
        engine = AsyncLLM.from_engine_args(args)
        stack.callback(engine.shutdown)

        comments, verdicts = asyncio.Queue(), {}
        workers = [asyncio.create_task(moderator(engine, comments, verdicts)) for _ in range(2)]
        for number, text in enumerate(["nice!", "what a day", "I disagree, and here is why. " * 40, "first"]):
            await comments.put((number, text))
        for _ in workers:
            await comments.put(None)
        await asyncio.gather(*workers)
        print("verdicts", {number: len(verdict) for number, verdict in sorted(verdicts.items())})
        assert len(verdicts) == 4
        config = engine.vllm_config
        print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
        print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
