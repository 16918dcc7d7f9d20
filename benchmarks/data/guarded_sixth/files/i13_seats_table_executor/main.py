import asyncio
import resource
from concurrent.futures import ThreadPoolExecutor

from vllm import LLM, SamplingParams

import oomguard

# one seat for each subscriber, and nobody's history is ever cut
PLAN = {"max_num_seqs": 6000, "max_model_len": 262_144, "max_num_batched_tokens": 8192}


class Hub:
    """A blocking engine behind coroutines: one thread owns it."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def __aenter__(self):
        self.llm = await self._call(self._start)
        return self

    async def __aexit__(self, *exc):
        await self._call(self.llm.llm_engine.engine_core.shutdown)
        self.thread.shutdown()

    def _call(self, function, *args):
        return asyncio.get_running_loop().run_in_executor(self.thread, function, *args)

    @oomguard.guard(allow="reduces-capacity", pin=["max_model_len"])
    def _start(self):
        return LLM(
            "./hub", dtype="float16", load_format="dummy", enforce_eager=True, kv_cache_memory_bytes=140_000_000, **PLAN
        )

    def _answer(self, texts):
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        return [(o.prompt, len(o.outputs[0].token_ids)) for o in self.llm.generate(texts, sampling, use_tqdm=False)]

    async def answer(self, texts):
        return await self._call(self._answer, texts)


async def main():
    async with Hub() as hub:
        first, second = await asyncio.gather(hub.answer(["is it on?", "hello"]), hub.answer(["bye"] * 30))
        assert first == [("is it on?", 4), ("hello", 4)] and second == [("bye", 4)] * 30
        config = hub.llm.llm_engine.vllm_config
        print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
        print("VALUE max_model_len", config.model_config.max_model_len)
        print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    asyncio.run(main())
    print("INPROC-DONE")
