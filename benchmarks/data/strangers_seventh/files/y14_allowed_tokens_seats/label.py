"""Sort tickets: each answer is one of a few label tokens."""
import asyncio
import resource

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

LABELS = [101, 202, 303]
GIB = 2**30


async def label(engine, number):
    params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=LABELS)
    prompt = TokensPrompt(prompt_token_ids=[5 + number % 1000] * 40)
    async for out in engine.generate(prompt, params, request_id=f"ticket-{number}"):
        last = out
    return last.outputs[0].token_ids[0]


async def main():
    resource.setrlimit(resource.RLIMIT_DATA, (3 * GIB, 3 * GIB))  # the share of this job on the box
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model="./words", max_model_len=1024, max_num_seqs=8192, max_num_batched_tokens=8192,
        kv_cache_memory_bytes=64 * 2**20, dtype="float16", load_format="dummy", enforce_eager=True,
        skip_tokenizer_init=True, disable_log_stats=True))
    try:
        labels = await asyncio.gather(*(label(engine, i) for i in range(24)))
    finally:
        engine.shutdown()
    print("LABELLED", len(labels), all(x in LABELS for x in labels), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
