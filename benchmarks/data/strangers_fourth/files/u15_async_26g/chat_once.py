"""AsyncLLM: answers three prompts at once and leaves."""
import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

GIB = 1024**3


async def one(engine, i):
    last = None
    async for out in engine.generate(
        TokensPrompt(prompt_token_ids=[5 + i] * (40 + i)),
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        request_id=f"r{i}",
    ):
        last = out
    return len(last.outputs[0].token_ids)


async def main():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model="./mixtral",
            dtype="float16",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=8192,
            max_num_seqs=16,
            kv_cache_memory_bytes=26 * GIB,
        )
    )
    try:
        print("TOKENS", await asyncio.gather(*(one(engine, i) for i in range(3))))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
