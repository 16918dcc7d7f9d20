import asyncio
import pickle

import oomguard

JOB = pickle.dumps(
    {
        "model": "./clerk",
        "max_model_len": 32768,
        "max_num_seqs": 14,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 50_000_000,
        "dtype": "float16",
        "load_format": "dummy",
        "enforce_eager": True,
    }
)


def build(job):
    from vllm import EngineArgs, LLM  # the heavy import, away from the loop

    return LLM.from_engine_args(EngineArgs(**pickle.loads(job)))


def complete(llm, texts):
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    return [len(o.outputs[0].token_ids) for o in llm.generate(texts, sampling, use_tqdm=False)]


async def heart(beats):
    while True:
        beats.append(1)
        await asyncio.sleep(0.5)


async def main():
    beats = []
    async with asyncio.TaskGroup() as group:
        heartbeat = group.create_task(heart(beats))
        with oomguard.guard(allow="reduces-capacity", pin=["max_num_batched_tokens"]):
            llm = await asyncio.to_thread(build, JOB)  # takes the context along
        print("tokens", await asyncio.to_thread(complete, llm, ["dear sir", "dear madam"]))
        heartbeat.cancel()
    print("the loop lived", len(beats) > 3)
    config = llm.llm_engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
