import asyncio

from vllm import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


async def build(config):
    """As vLLM's own server does it: the configuration first, the engine from it."""
    return AsyncLLM.from_vllm_config(
        config, usage_context=UsageContext.ENGINE_CONTEXT, enable_log_requests=False, disable_log_stats=True
    )


async def main():
    args = AsyncEngineArgs(
        model="./coder",
        dtype="float16",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=28_672,
        max_num_seqs=5,
        kv_cache_memory_bytes=33_000_000,
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    caught = None
    with oomguard.guard(allow="reduces-capacity") as watch:
        try:
            engine = await build(config)
        except Exception as error:
            caught = error
        else:
            engine.shutdown()
            raise SystemExit(f"started with {config.model_config.max_model_len}")
    assert type(caught) is RuntimeError, type(caught)
    assert str(caught).startswith("Engine core initialization failed"), caught
    assert any("oomguard" in note for note in getattr(caught, "__notes__", [])), caught
    assert watch is not None
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
