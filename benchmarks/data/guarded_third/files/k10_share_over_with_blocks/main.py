import argparse
import asyncio
import uuid

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

import oomguard

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="./tutor")
parser.add_argument("--share", type=float, default=0.97)
parser.add_argument("--blocks", type=int, default=200)
parser.add_argument("--context", type=int, default=16384)


class Backend:
    def __init__(self, options):
        self.options = options

    async def __aenter__(self):
        args = AsyncEngineArgs(
            model=self.options.model,
            gpu_memory_utilization=self.options.share,
            num_gpu_blocks_override=self.options.blocks,
            max_model_len=self.options.context,
            max_num_seqs=16,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
        self.engine = AsyncLLMEngine.from_engine_args(args)
        return self

    async def __aexit__(self, *exc):
        self.engine.shutdown()

    async def stream(self, text):
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        async for output in self.engine.generate(text, sampling, uuid.uuid4().hex):
            yield len(output.outputs[0].token_ids)


@oomguard.guard
async def main(options):
    async with Backend(options) as backend:
        print("stream", [count async for count in backend.stream("why is the sky blue")][-1])
        config = backend.engine.vllm_config
        print("VALUE gpu_memory_utilization", config.cache_config.gpu_memory_utilization)
        print("VALUE num_gpu_blocks_override", config.cache_config.num_gpu_blocks_override)
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)


if __name__ == "__main__":
    asyncio.run(main(parser.parse_args()))
    print("INPROC-DONE")
