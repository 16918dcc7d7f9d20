import asyncio
import math
import resource

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard

GIB = 2**30


async def surprise(engine, name, tokens):
    """Mean negative log-probability of a text."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    async for output in engine.generate({"prompt_token_ids": tokens}, sampling, name):
        final = output
    assert len(final.prompt_logprobs) == len(tokens) and final.prompt_logprobs[0] is None
    values = [entry[token].logprob for token, entry in zip(tokens[1:], final.prompt_logprobs[1:])]
    return -sum(values) / len(values)


async def main():
    with oomguard.guard():
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model="./linguist",
                dtype="float16",
                load_format="dummy",
                enforce_eager=True,
                max_model_len=4096,
                max_num_seqs=6,
                max_num_batched_tokens=4096,
                kv_cache_memory_bytes=12_000_000,
            )
        )
    texts = {f"text-{n}": [100 + (n * 97 + i * 13) % 190_000 for i in range(size)] for n, size in enumerate((20, 2900, 35))}
    short = await surprise(engine, "first", texts["text-0"])
    values = await asyncio.gather(*(surprise(engine, name, tokens) for name, tokens in texts.items()))
    assert len(values) == 3 and all(math.isfinite(value) and value > 0 for value in values), values
    assert abs(values[0] - short) < 0.05, (values, short)
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (6 * GIB, resource.getrlimit(resource.RLIMIT_AS)[1]))
    asyncio.run(main())
    print("INPROC-DONE")
