import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def serve(args):
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        last = None
        async for out in engine.generate(args.greeting, SamplingParams(max_tokens=4, ignore_eos=True), request_id="one"):
            last = out
        print("BLIND40-DONE", len(last.outputs[0].token_ids), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser.add_argument("--greeting", default="hi")
    parser = AsyncEngineArgs.add_cli_args(parser)
    asyncio.run(serve(parser.parse_args()))
