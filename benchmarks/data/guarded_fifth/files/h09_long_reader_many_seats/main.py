import asyncio
import os
import resource

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard

LIMIT_GIB = float(os.environ.get("JOB_MEMORY_GIB", "3"))


class Reader:
    """Answers questions about long texts, for as many readers as come."""

    @oomguard.guard(allow="reduces-capacity", pin=["max_model_len"])
    async def open(self):
        args = AsyncEngineArgs(
            model="./novel",
            max_model_len=131_072,
            max_num_seqs=4096,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=40_000_000,
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
        )
        self.engine = AsyncLLM.from_engine_args(args)
        return self

    async def ask(self, number, text):
        sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        async for output in self.engine.generate(text, sampling, f"question-{number}"):
            final = output
        return len(final.outputs[0].token_ids)


async def main():
    reader = await Reader().open()
    questions = ["Who is Ishmael?", "Where does the ship sail?", "What is the whale's name?"]
    print("answers", await asyncio.gather(*(reader.ask(n, text) for n, text in enumerate(questions))))
    config = reader.engine.vllm_config
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    reader.engine.shutdown()


if __name__ == "__main__":
    limit = int(LIMIT_GIB * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    asyncio.run(main())
    print("INPROC-DONE")
