"""One rank of a job without torch: its peers are files in a folder; a rank whose length does not fit fails in vLLM's words.

The others wait for it as in a collective. ``FITS`` holds the length that fits by rank, ``MODES`` how a rank behaves otherwise.
"""

import json
import os
import sys
import time
from pathlib import Path

told = {**os.environ, "RANK": os.environ.get("RANK") or os.environ["SLURM_PROCID"]}
folder, rank, size = (
    Path(told["JOB"]),
    int(told["RANK"]),
    int(told.get("WORLD_SIZE") or told["SLURM_NTASKS"]),
)
mode = json.loads(os.environ.get("MODES", "{}")).get(str(rank), "")
fits = json.loads(os.environ.get("FITS", "{}")).get(str(rank), 1 << 20)
overrides = json.loads(os.environ.get("OOMGUARD_VLLM_OVERRIDES", "{}"))
length = overrides.get("max_model_len", 32768)
if overrides:
    with open(os.environ.get("OOMGUARD_VLLM_ACKNOWLEDGE", os.devnull), "a") as told:
        told.write(json.dumps({"pid": os.getpid(), "order": 1, "applied": overrides}) + "\n")
with (folder / f"lengths-{rank}.log").open("a") as lengths:
    lengths.write(f"{length}\n")
if mode == "mpi" and overrides:
    sys.exit(
        "*** An error occurred in MPI_Init\n*** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort)"
    )
print(
    "(APIServer pid=1) INFO 11-21 07:14:27 [api_utils.py:286] non-default args: {'model': './none'}",
    flush=True,
)
if mode == "writes":
    with (folder / "results.jsonl").open("a") as results:
        results.write("row\n")
time.sleep(float(os.environ.get("AFTER_S", "0")))
if length > fits:
    print(
        "(EngineCore pid=2) ERROR 11-21 07:14:52 [core.py:1510] ValueError: To serve at least one request with the model's max seq len"
        f" ({length}), (0.02 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the"
        f" available memory, the estimated maximum model length is {fits}. Try increasing `gpu_memory_utilization`",
        flush=True,
    )
    sys.exit(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
if mode == "other":
    sys.exit("KeyError: 'results'")
(folder / f"here-{length}-{rank}.log").touch()
wanted = [folder / f"here-{length}-{other}.log" for other in range(size)] if mode != "early" else []
wanted += [folder / "never"] if mode == "waits" else []
while not all(path.exists() for path in wanted):
    if mode == "lost" and any(path.exists() for path in folder.glob("failed-*")):
        sys.exit("RuntimeError: Connection closed by peer [127.0.0.1]:9130")
    time.sleep(0.02)
print(f"RESULT {rank} {length}")
