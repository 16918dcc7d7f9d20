import asyncio
import dataclasses

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

import oomguard

BASE = AsyncEngineArgs(model="./hybrid", dtype="float32", load_format="dummy", enforce_eager=True, max_num_seqs=4, max_num_batched_tokens=4096)
LONG = dataclasses.replace(BASE, max_model_len=65_536, kv_cache_memory_bytes=30_000_000)


@oomguard.guard(allow="reduces-capacity")
def open_engine(args):
    return AsyncLLMEngine.from_engine_args(args)


async def worker(engine, queue, done):
    while True:
        number, text = await queue.get()
        async for output in engine.generate(text, SamplingParams(max_tokens=6, ignore_eos=True), f"job-{number}"):
            if output.finished:
                done.append(number)
        queue.task_done()


async def main():
    engine = open_engine(LONG)
    queue, done = asyncio.Queue(), []
    for number in range(5):
        queue.put_nowait((number, f"Job {number}: list three rivers."))
    workers = [asyncio.create_task(worker(engine, queue, done)) for _ in range(2)]
    await queue.join()
    for task in workers:
        task.cancel()
    print("done", sorted(done))
    print("VALUE max_model_len", engine.vllm_config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", engine.vllm_config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_batched_tokens", engine.vllm_config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_num_seqs", engine.vllm_config.scheduler_config.max_num_seqs)
    print("LONG still says", LONG.max_model_len)
    engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
