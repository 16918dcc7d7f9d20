"""The engine from a configuration that is made first (it is logged to the experiment tracker)."""
import asyncio
import traceback

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def main():
    vllm_config = AsyncEngineArgs(
        model="./model", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=48000, kv_cache_memory_bytes=24_000_000, max_num_seqs=8
    ).create_engine_config()
    print("tracked: max_model_len =", vllm_config.model_config.max_model_len)
    try:
        with oomguard.guard(allow="reduces-capacity"):
            engine = AsyncLLM.from_vllm_config(vllm_config)
    except Exception as error:
        traceback.print_exception(error)
        print("VALUE max_model_len", vllm_config.model_config.max_model_len)
        print("CAUGHT", type(error).__name__)
        return
    async for output in engine.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True), "0"):
        print(len(output.outputs[0].token_ids))
    print("VALUE max_model_len", engine.vllm_config.model_config.max_model_len)
    engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
