"""A small chat backend: one engine for the life of the process."""
import asyncio
import os

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, as the installation page says

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams  # noqa: E402

import oomguard  # noqa: E402


class Backend:
    def __init__(self):
        self.engine = None

    async def start(self):
        args = AsyncEngineArgs(model="./chat", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=100_000, max_num_seqs=16)
        with oomguard.guard(allow="reduces-capacity", pin=["max_num_seqs"]):
            self.engine = AsyncLLMEngine.from_engine_args(args)

    async def reply(self, text, request_id):
        last = None
        async for last in self.engine.generate(text, SamplingParams(max_tokens=8, ignore_eos=True), request_id):
            pass
        return last.outputs[0].token_ids


async def main():
    backend = Backend()
    await backend.start()
    for number, text in enumerate(["Hello", "How are you?"]):
        print(text, len(await backend.reply(text, str(number))))
    print("VALUE max_model_len", backend.engine.vllm_config.model_config.max_model_len)
    print("VALUE max_num_seqs", backend.engine.vllm_config.scheduler_config.max_num_seqs)
    backend.engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
