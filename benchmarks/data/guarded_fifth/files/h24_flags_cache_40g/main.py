"""The settings are those of the old server with 64 GB; the new one has less."""

import asyncio
import shlex

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

import oomguard

OLD = """
--model ./legal --dtype float16 --load-format dummy --enforce-eager
--max-model-len 32k --max-num-seqs 8 --max-num-batched-tokens 4k --kv-cache-memory-bytes 40G
"""


async def summarize(engine, number, text):
    final = None
    sampling = SamplingParams(max_tokens=7, temperature=0, ignore_eos=True)
    async for final in engine.generate(f"{text}\nTL;DR:", sampling, request_id=f"case-{number}"):
        pass
    return len(final.outputs[0].token_ids)


async def main():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(shlex.split(OLD)))
    with oomguard.guard(allow="reduces-capacity", floors={"max_model_len": 32_000}, pin=["max_num_seqs"]):
        engine = AsyncLLMEngine.from_engine_args(args)
    texts = ["The tenant shall not keep snakes.", "The landlord shall repair the roof."]
    print("summaries", await asyncio.gather(*(summarize(engine, n, text) for n, text in enumerate(texts))))
    config = engine.vllm_config
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
