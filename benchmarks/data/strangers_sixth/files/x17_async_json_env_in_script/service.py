"""A small service around AsyncLLM; here it answers two prompts and ends."""
import asyncio
import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import AsyncEngineArgs, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402


async def answer(engine, number):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    last = None
    async for out in engine.generate(TokensPrompt(prompt_token_ids=[9 + number] * 80), params, request_id=f"r{number}"):
        last = out
    return len(last.outputs[0].token_ids)


async def main(path):
    with open(path) as f:
        conf = json.load(f)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**conf))
    try:
        lengths = await asyncio.gather(*(answer(engine, n) for n in range(2)))
    finally:
        engine.shutdown()
    print("STREAMED", len(lengths), "x", lengths[0], flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
