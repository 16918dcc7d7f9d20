import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


class Digest:
    @classmethod
    async def create(cls):
        self = cls()
        args = AsyncEngineArgs(
            model="./digest",
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=32_768,
            max_num_batched_tokens=32_768,
            kv_cache_memory_bytes=20_000_000,
            max_num_seqs=4,
        )
        with oomguard.guard():
            self.engine = AsyncLLM.from_engine_args(args)
        return self

    async def stream(self, name, tokens):
        sampling = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA)
        count = 0
        async for output in self.engine.generate({"prompt_token_ids": tokens}, sampling, name):
            count += len(output.outputs[0].token_ids)
        return count


async def main():
    digest = await Digest.create()
    print("short", await digest.stream("short", list(range(20, 220))))
    print("book", await digest.stream("book", [50 + n % 1500 for n in range(30_000)]))
    config = digest.engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    digest.engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
