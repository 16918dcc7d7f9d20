"""One rank of a job on the CPU: it allocates by its length, and joins the others in every step.

Under torchrun it joins them in a gloo group, whose peers notice at once when one is gone, and allocates on a simulated device
(``oomguard.testing.limit_memory``). As an actor's process on Ray it waits for the others by files, as a collective of a GPU does whose
peer is gone: until somebody ends it. At a moment that the round draws one rank finds its device full. It says so in vLLM's words, as
what `oomguard run` reads is what an engine prints.
"""

import json
import os
import time
from pathlib import Path

BYTES_PER_TOKEN = 640
LENGTH = 32768
STEPS = 6
STEP_S = 0.2

drawn = json.loads(os.environ["DRAWN"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
notes = Path(drawn["notes"])
overrides = json.loads(os.environ.get("OOMGUARD_VLLM_OVERRIDES", "{}"))
length = overrides.get("max_model_len", LENGTH)
room = drawn["room_tokens"].get(str(rank), 1 << 20) * BYTES_PER_TOKEN


def note(what: str) -> None:
    """Note what happens, with the time of the machine's own clock, which the skew does not reach."""
    with (notes / f"{rank}.log").open("a") as file:
        file.write(json.dumps({"what": what, "at_s": time.clock_gettime(time.CLOCK_BOOTTIME), "length": length}) + "\n")


def allocate() -> None:
    """Allocate what the length takes; raise RuntimeError or MemoryError where the device has no room for it."""
    if drawn["group"] != "gloo":
        if length * BYTES_PER_TOKEN > room:
            raise MemoryError
        return
    import torch

    from oomguard.testing import limit_memory

    with limit_memory(room):
        torch.empty(length * BYTES_PER_TOKEN, dtype=torch.uint8)


def join(step: int) -> None:
    """Wait for all ranks in a step."""
    if drawn["group"] == "gloo":
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.ones(1))
        return
    (notes / f"step-{length}-{step}-{rank}.log").touch()
    while any(not (notes / f"step-{length}-{step}-{other}.log").exists() for other in range(size)):
        time.sleep(0.01)


note("began")
if overrides:
    with Path(os.environ["OOMGUARD_VLLM_ACKNOWLEDGE"]).open("a") as told:
        told.write(json.dumps({"pid": os.getpid(), "order": 1, "applied": overrides}) + "\n")
print("(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {'model': './none'}", flush=True)
if drawn["group"] == "gloo":
    import torch.distributed

    torch.distributed.init_process_group("gloo")
for number in range(STEPS):
    if number == drawn["step"]:
        time.sleep(drawn["after_s"] if str(rank) in drawn["room_tokens"] else 0)
        try:
            allocate()
        except (RuntimeError, MemoryError) as error:
            note("failed")
            gib = 1 << 30
            print(
                "(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max"
                f" seq len ({length}), ({length * BYTES_PER_TOKEN / gib:.2f} GiB KV cache is needed, which is larger than the available"
                f" KV cache memory ({room / gib:.2f} GiB). Based on the available memory, the estimated maximum model length is"
                f" {room // BYTES_PER_TOKEN}. Try increasing `gpu_memory_utilization`",
                flush=True,
            )
            raise SystemExit("RuntimeError: Engine core initialization failed. See root cause above.") from error
    join(number)
    time.sleep(STEP_S)
note("ran")
print(f"RESULT {rank} {length}", flush=True)
