import asyncio
import dataclasses
import resource

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

import oomguard


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    address_space_gib: float = 8

    def apply(self):  # ulimit -v, inherited by the engine's processes
        size = int(self.address_space_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


async def answer(engine, number):
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [11 + number, 12, 13]}
    final = None
    async for final in engine.generate(prompt, sampling, request_id=f"id-{number}"):
        pass
    return len(final.outputs[0].token_ids)


async def main():
    args = AsyncEngineArgs(
        model="./broad",
        dtype="float16",
        load_format="dummy",
        compilation_config={"mode": 2, "backend": "eager"},
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=16384,
        kv_cache_memory_bytes=24_000_000,
    )
    with oomguard.guard():
        engine = AsyncLLMEngine.from_engine_args(args)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(engine, n)) for n in range(3)]
    print("answers", [task.result() for task in tasks])
    config = engine.vllm_config
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    Limits().apply()
    with asyncio.Runner() as runner:
        runner.run(main())
    print("INPROC-DONE")
