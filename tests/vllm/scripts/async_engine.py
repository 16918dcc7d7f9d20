"""A user's own server: flags of vLLM's parser, AsyncLLM, one answer."""

import argparse
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def answer(asked: argparse.Namespace) -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(asked))
    try:
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        async for output in engine.generate("the quick brown", sampling, request_id="1"):
            last = output
    finally:
        engine.shutdown()
    print("RESULT", len(last.outputs[0].token_ids))


if __name__ == "__main__":
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    asyncio.run(answer(parser.parse_args()))
