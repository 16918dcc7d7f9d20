import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def ask(engine, number):
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    async for output in engine.generate(f"Question {number}: why?", sampling, f"request-{number}"):
        if output.finished:
            return len(output.outputs[0].token_ids)


async def main():
    args = AsyncEngineArgs(
        model="./qa", dtype="float32", load_format="dummy", enforce_eager=True, max_model_len=20000, block_size=64, kv_cache_memory_bytes=40_000_000, max_num_seqs=8
    )
    with oomguard.guard(allow="reduces-capacity"):
        engine = AsyncLLM.from_engine_args(args)
    try:
        print("lengths", await asyncio.gather(*(ask(engine, n) for n in range(4))))
        print("VALUE max_model_len", engine.vllm_config.model_config.max_model_len)
        print("VALUE block_size", engine.vllm_config.cache_config.block_size)
    finally:
        engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
