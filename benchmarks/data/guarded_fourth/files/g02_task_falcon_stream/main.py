import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def start_engine():
    args = AsyncEngineArgs(
        model="./storyteller",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=15_000_000,
    )
    return AsyncLLM.from_engine_args(args)


async def stream(engine, number, queue):
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for output in engine.generate(f"once upon a time, {number}", sampling, f"story-{number}"):
        await queue.put((number, len(output.outputs[0].token_ids)))
    await queue.put((number, None))


async def main():
    with oomguard.guard():
        starting = asyncio.create_task(start_engine())  # warms up while the rest of the service is set up
        await asyncio.sleep(0.01)
        engine = await starting
    queue, counts, open_streams = asyncio.Queue(), {}, 4
    tasks = [asyncio.create_task(stream(engine, n, queue)) for n in range(open_streams)]
    while open_streams:
        number, tokens = await queue.get()
        if tokens is None:
            open_streams -= 1
        else:
            counts[number] = counts.get(number, 0) + tokens
    await asyncio.gather(*tasks)
    print("deltas", sorted(counts.items()))
    config = engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
