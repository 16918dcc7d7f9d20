import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

ARGS = AsyncEngineArgs(model="./model", max_model_len=2048, kv_cache_memory_bytes=48_000_000, dtype="float16", load_format="dummy", enforce_eager=True,
                       max_num_seqs=8, enable_log_requests=False)


async def one(engine, name, limit):
    seen = 0
    async for out in engine.generate(f"hello {name}", SamplingParams(max_tokens=64, ignore_eos=True), request_id=name):
        seen = len(out.outputs[0].token_ids)
        if seen >= limit:
            await engine.abort(name)
            break
    return seen


async def main():
    engine = AsyncLLM.from_engine_args(ARGS)
    try:
        print("HEALTHY50-DONE", await asyncio.gather(one(engine, "a", 3), one(engine, "b", 999)), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
