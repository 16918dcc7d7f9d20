import asyncio
import os
import signal

import psutil
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

import oomguard

CLIENTS, TOKENS = 12, 160


def kill_core():
    """What the kernel does to the core where the machine's memory runs out."""
    for process in psutil.Process().children(recursive=True):
        if "EngineCore" in " ".join(process.cmdline()) or "EngineCore" in process.name():
            os.kill(process.pid, signal.SIGKILL)
            return process.pid
    raise SystemExit("no core was found")


async def client(engine, number, received, some):
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    prompt = {"prompt_token_ids": [30 + (number * 17 + n) % 1500 for n in range(6 + number)]}
    async for output in engine.generate(prompt, sampling, f"client-{number}"):
        received[number] += output.outputs[0].token_ids
        if sum(map(len, received.values())) > CLIENTS * 10:
            some.set()
    return output.outputs[0].finish_reason


async def main():
    args = AsyncEngineArgs(
        model="./chatty",
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=200_000_000,
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
    )
    with oomguard.guard(restart=True):
        engine = AsyncLLM.from_engine_args(args)
    received, some = {n: [] for n in range(CLIENTS)}, asyncio.Event()
    clients = [asyncio.create_task(client(engine, n, received, some)) for n in received]
    await asyncio.wait_for(some.wait(), 120)
    assert not any(task.done() for task in clients)
    print("killed", kill_core() > 0, "after", sum(map(len, received.values())) >= CLIENTS * 10)
    reasons = set(await asyncio.gather(*clients))
    print("streams", {len(tokens) for tokens in received.values()}, reasons)
    assert {len(tokens) for tokens in received.values()} == {TOKENS} and reasons == {"length"}
    config = engine.vllm_config
    print("VALUE max_model_len", config.model_config.max_model_len)
    print("VALUE max_num_seqs", config.scheduler_config.max_num_seqs)
    print("VALUE max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    print("VALUE kv_cache_memory_bytes", config.cache_config.kv_cache_memory_bytes)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
    print("INPROC-DONE")
