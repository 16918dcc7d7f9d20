import asyncio

from vllm import AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


@oomguard.guard(allow="reduces-capacity")
async def start(**settings):
    await asyncio.sleep(0)  # the lifespan hook of the web framework
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))


async def stream(engine, request_id, prompt):
    count = 0
    async for output in engine.generate(prompt, SamplingParams(max_tokens=10, ignore_eos=True), request_id):
        count = len(output.outputs[0].token_ids)
    return count


async def main():
    engine = await start(model="./model", dtype="float16", load_format="dummy", enforce_eager=True, max_model_len=30_000, max_num_seqs=32, kv_cache_memory_bytes=16_000_000)
    counts = await asyncio.gather(stream(engine, "a", "Tell me a joke"), stream(engine, "b", "Tell me another one"))
    print("streamed", counts)
    print("VALUE max_model_len", engine.vllm_config.model_config.max_model_len)
    print("VALUE max_num_seqs", engine.vllm_config.scheduler_config.max_num_seqs)
    engine.shutdown()
    print("INPROC-DONE")


if __name__ == "__main__":
    asyncio.run(main())
