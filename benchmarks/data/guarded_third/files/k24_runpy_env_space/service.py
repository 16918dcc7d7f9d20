"""Run by path, as a plug-in: it knows nothing of any guard."""
import asyncio
import os
import sys

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

HOME = os.path.dirname(os.path.abspath(__file__))


def arguments(**more):
    return AsyncEngineArgs(
        model=os.path.join(HOME, "oracle"), dtype="float16", load_format="dummy", enforce_eager=True, max_num_seqs=5, **more
    )


async def serve(questions):
    engine = AsyncLLM.from_engine_args(arguments(max_model_len=100_000, max_num_batched_tokens=4096))
    try:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        for number, question in enumerate(questions):
            async for output in engine.generate(question, sampling, f"q{number}"):
                tokens = len(output.outputs[0].token_ids)
            print("answer", number, tokens)
        config = engine.vllm_config
        return {
            "max_model_len": config.model_config.max_model_len,
            "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        }
    finally:
        engine.shutdown()


if __name__ == "service":
    values = asyncio.run(serve(sys.argv[1:]))
