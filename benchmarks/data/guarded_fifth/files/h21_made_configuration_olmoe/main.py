import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def main():
    args = AsyncEngineArgs(
        model="./experts",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=16384,
        max_num_seqs=8,
        kv_cache_memory_bytes=12_000_000,
    )
    # the configuration is logged and checked by the platform's own code before the engine is made
    config = args.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT)
    try:
        with oomguard.guard(allow="reduces-capacity"):
            engine = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.ENGINE_CONTEXT)
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        print("lines of notes", len(notes.splitlines()))
        assert "Engine core initialization failed" in str(error), error
        assert "oomguard" in notes, notes
    else:
        async for output in engine.generate("hello", SamplingParams(max_tokens=2), "a"):
            pass
        raise SystemExit(f"started with {engine.vllm_config.model_config.max_model_len}")
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
