"""Figures: 8 jobs started at one moment on 4 simulated devices, and leases whose holder is killed.

Each job is `oomguard run --gpus auto --wait 3m -- vllm serve MODEL`: planned, placed by NVML (a C library that tells of four devices),
leased and started. In half of the rounds a lease lasts as long as the job and no device may be shared; in the other half it lasts until
the engine has started, each takes 0.45 of its device, and no two starts may meet on one. Then runs are killed with SIGKILL, and how long
it takes until the kernel has released their lease is measured. 100 rounds and 20 kills by default.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

from oomguard.placement.leases import LeaseFolder
from support.figure import conclude
from support.placing import LIMIT_S, Watch, made, overlaps, serve, simulated_gpus, start
from support.supervising import wait_for

JOBS = 8
# Who waits looks five times a second, and 8 programs share this machine's cores.
IDLE_GOAL_S = 1.0
RELEASE_GOAL_S = 1.0


def round_of(until: str, library: Path) -> tuple[list[str], float]:
    """Start the jobs of one round at one moment; return what went wrong, and how long a device was free while one waited for it."""
    share = "0.9" if until == "job" else "0.45"
    with tempfile.TemporaryDirectory() as folder:
        gpus = made(Path(folder), library=library)
        (gpus.folder / "leases").mkdir(mode=0o700)
        options = ("--gpus", "auto", "--wait", f"{LIMIT_S}s", "--lease", until)
        length = ("--max-model-len", "8192" if until == "job" else "64")
        command = [*serve(gpus, "--gpu-memory-utilization", share), *length]
        if until == "start":  # a smaller model: two of them have room on a device
            config = gpus.folder / "model" / "config.json"
            config.write_text(config.read_text().replace('"num_hidden_layers": 32', '"num_hidden_layers": 8'))
        with Watch(gpus) as watch:
            jobs = [start(gpus, options, command, SIMULATED_RUN_S="0.5") for _ in range(JOBS)]
            ended = [(*job.communicate(timeout=LIMIT_S), job.returncode) for job in jobs]
        problems = [f"status {status}: {errors[-400:]}" for _, errors, status in ended if status]
        problems += [f"{until}: {what}" for what in overlaps(gpus, "ends" if until == "job" else "started")]
        if (ran := sum(what == "ends" for _, _, what, _ in gpus.happened())) != JOBS:
            problems.append(f"{ran} of {JOBS} ran")
        return problems, watch.idle_s


def released_s(library: Path) -> float:
    """Kill a run that holds a lease, and return after how long the lease was free."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        gpus = made(Path(name), 1, library=library)
        job = stack.enter_context(start(gpus, ("--gpus", "auto"), ["sleep", "60"]))
        folder, device = LeaseFolder(gpus.folder / "leases"), (gpus.folder / "devices").read_text().split()[1]
        if not wait_for(lambda: bool(folder.holders([device])), 60):
            raise SystemExit(f"no lease: {job.communicate()[1]}")
        job.kill()
        began_s = time.monotonic()
        wait_for(lambda: not folder.holders([device]), 60)
        return time.monotonic() - began_s


def main() -> None:
    """Run the rounds, then the kills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args()
    found: list[str] = []
    idle_s = 0.0
    with tempfile.TemporaryDirectory() as library:
        simulated_gpus.build(Path(library))
        for number in range(asked.rounds):
            problems, longest_s = round_of("start" if number % 2 else "job", Path(library))
            found += [f"round {number}: {problem}" for problem in problems]
            idle_s = max(idle_s, longest_s)
        slowest_s = max(released_s(Path(library)) for _ in range(asked.kills))
    print("\n".join(found))
    met = not found and idle_s <= IDLE_GOAL_S and slowest_s <= RELEASE_GOAL_S
    conclude(
        f"{asked.rounds} rounds of {JOBS} jobs on 4 devices: {len(found)} problems (goal: 0); a device was free for {idle_s:.2f} s at"
        f" most while one waited for it (goal: {IDLE_GOAL_S:g} s); {asked.kills} kills: free after {slowest_s:.3f} s at most"
        f" (goal: {RELEASE_GOAL_S:g} s)",
        met=met,
    )


if __name__ == "__main__":
    main()
