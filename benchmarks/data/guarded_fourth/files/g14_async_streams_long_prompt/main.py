import asyncio
import itertools
import resource

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard

numbers = itertools.count()


async def stream(engine, length, max_tokens):
    prompt = {"prompt_token_ids": [9 + (n * 7919) % 1500 for n in range(length)]}
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA
    )
    count = 0
    async for output in engine.generate(prompt, sampling, f"stream-{next(numbers)}"):
        count += len(output.outputs[0].token_ids)
    return count


async def main():
    args = AsyncEngineArgs(
        model="./gateway",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=8,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=24_000_000,
    )
    with oomguard.guard():
        engine = AsyncLLM.from_engine_args(args)
    short = [asyncio.create_task(stream(engine, 10 + n, max_tokens=40)) for n in range(3)]
    await asyncio.sleep(0.1)
    long = asyncio.create_task(stream(engine, 6000, max_tokens=5))  # comes while the others are being answered
    print("short", await asyncio.gather(*short), "long", await long)
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))
    asyncio.run(main())
    print("INPROC-DONE")
