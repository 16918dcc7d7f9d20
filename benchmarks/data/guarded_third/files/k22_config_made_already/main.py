import asyncio

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def main():
    args = AsyncEngineArgs(
        model="./museum",
        max_model_len=16384,
        max_num_seqs=7,
        kv_cache_memory_bytes=8_000_000,
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
    )
    config = args.create_engine_config()
    try:
        with oomguard.guard(allow="reduces-capacity"):
            engine = AsyncLLM.from_vllm_config(config)
    except RuntimeError as error:
        print("engine's own", "Engine core initialization failed" in str(error))
        print("explained", any("oomguard" in note for note in getattr(error, "__notes__", [])))
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
        print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
        print("UNFIXED", type(error).__name__)
        raise
    engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
