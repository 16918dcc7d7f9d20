"""Simulate one rank of the fleet demo.

If the context length does not fit, the rank ends with vLLM's error message. Otherwise it waits for
the other ranks in each step, as a collective operation does.
"""

import json
import os
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
room_tokens = int(sys.argv[1])
steps = Path(sys.argv[2])
overrides = json.loads(os.environ.get("OOMGUARD_VLLM_OVERRIDES", "{}"))
length = overrides.get("max_model_len", 32768)
if overrides:
    with Path(os.environ["OOMGUARD_VLLM_ACKNOWLEDGE"]).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "order": 1, "applied": overrides}) + "\n")
print("INFO 11-26 07:14:27 [api_utils.py:286] non-default args: {'model': './tiny'}", flush=True)
if length > room_tokens:
    sys.exit(
        "ERROR 11-26 07:14:52 [core.py:1510] ValueError: To serve at least one request with the "
        f"model's max seq len ({length}), (0.02 GiB"
        " KV cache is needed, which is larger than the available KV cache memory (0.00 GiB). Based "
        "on the available memory, the estimated"
        f" maximum model length is {room_tokens}. Try increasing `gpu_memory_utilization`"
    )
for step in range(3):
    (steps / f"{length}-{step}-{rank}").touch()
    while any(not (steps / f"{length}-{step}-{other}").exists() for other in range(size)):
        time.sleep(0.02)
print(f"rank {rank} worked with {length} tokens", flush=True)
