import asyncio
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


class Service:
    """An engine for as long as an ``async with`` lasts."""

    def __init__(self, **settings):
        self.args = AsyncEngineArgs(**settings)

    @oomguard.guard(allow="reduces-capacity", pin=("max_model_len", "block_size"))
    async def __aenter__(self):
        self.engine = AsyncLLM.from_engine_args(self.args)
        return self

    async def __aexit__(self, *exc):
        self.engine.shutdown()

    async def ask(self, text):
        async for output in self.engine.generate(text, SamplingParams(max_tokens=2), "ask"):
            last = output
        return last


async def main():
    service = Service(
        model="./pensions",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=40_000,
        block_size=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=30_000_000,
    )
    try:
        async with service:
            await service.ask("when can I retire?")
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        if "Engine core initialization failed" not in str(error) or "oomguard" not in notes:
            raise
        print("as promised, nothing was changed:", notes.count("\n") + 1, "lines of notes")
    else:
        sys.exit("the engine started, though its length was pinned")
    print("VALUE max_model_len", service.args.max_model_len)
    print("VALUE block_size", service.args.block_size)
    print("VALUE max_num_seqs", service.args.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", service.args.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
