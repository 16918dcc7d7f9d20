import asyncio
import os
import signal

import psutil
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard


@oomguard.guard(restart=True)
def make_engine():
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model="./narrator",
            dtype="float32",
            load_format="dummy",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=60_000_000,
        )
    )


def kill_core():
    """What the kernel does when something else on the machine takes all memory."""
    cores = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    for core in cores:
        os.kill(core.pid, signal.SIGKILL)
    return len(cores)


class Room:
    """Six people listen; after some tokens of the first one the core is killed."""

    def __init__(self, engine, moments):
        self.engine = engine
        self.moments = sorted(moments)
        self.kills = 0

    async def listen(self, number, length):
        sampling = SamplingParams(
            max_tokens=length, ignore_eos=True, temperature=0, output_kind=RequestOutputKind.DELTA
        )
        heard = []
        async for output in self.engine.generate({"prompt_token_ids": prompt(number)}, sampling, f"listener-{number}"):
            heard += output.outputs[0].token_ids
            if number == 0 and self.moments and len(heard) >= self.moments[0]:
                self.moments.pop(0)
                self.kills += kill_core()
        return heard


def prompt(number):
    return [30 + (number * 53 + i * 7) % 1400 for i in range(10 + number)]


async def main():
    engine = make_engine()
    quiet = Room(engine, [])
    room = Room(engine, [40, 150])
    lengths = [260, 200, 120, 300, 90, 240]
    reference = await quiet.listen(7, 60)
    heard = await asyncio.gather(*(room.listen(n, length) for n, length in enumerate(lengths)))
    assert room.kills == 2, room.kills
    assert [len(tokens) for tokens in heard] == lengths, [len(tokens) for tokens in heard]
    assert await quiet.listen(7, 60) == reference
    assert await quiet.listen(3, 300) == heard[3]
    config = engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
