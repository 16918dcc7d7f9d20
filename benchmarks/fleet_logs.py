"""Figures: a fleet's logs read on a local Ray cluster of two nodes, beside one process and beside ``diagnose --jobs 2``.

The logs are made from templates of our own with known failures (``--logs``, ``--size``; 20,000 of 5 GiB by default) and lie as
Kubernetes, Ray and SLURM lay them out. The cluster is started before and not counted; the command that joins it is. After one pass that
warms the page cache the commands run in turn, ``--rounds`` times. What a worker takes is anonymous memory, the most of any worker
at any time, above the same worker idle.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude, skip
from support.fleet_logs import VERSION, Fleet, make_fleet
from support.memory import anonymous_bytes

RATIO_GOAL, MEMORY_GOAL_MIB = 0.85, 200
NODES = 2
POLL_S = 0.25


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which a command joins a cluster of two nodes with a CPU each, all of it on this machine."""
    from ray.cluster_utils import Cluster

    # Ray's workers are nice by 15 unless told: beside other work on the machine they would wait for what the other side does not.
    os.environ["RAY_worker_niceness"] = str(os.getpriority(os.PRIO_PROCESS, 0))  # noqa: SIM112 - as Ray spells it
    os.environ["RAY_TMPDIR"] = str(folder)  # another cluster on this machine has files of its own
    (folder / "ray").mkdir()
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(NODES - 1):
            started.add_node(num_cpus=1)
        started.wait_for_nodes()
        yield {**os.environ, "RAY_ADDRESS": started.address}
    finally:
        started.shutdown()


def workers() -> dict[int, int]:
    """Return the anonymous bytes of every Ray worker on this machine, by process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::"):
                found[int(path.parent.name)] = anonymous_bytes(int(path.parent.name), whole_tree=False)
    return found


class Peak:
    """The most that any Ray worker holds while this is entered."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(POLL_S):
            self.bytes = max(self.bytes, *workers().values(), 0)


def idle_bytes(environment: dict[str, str]) -> int:
    """Return what a Ray worker takes that has run one empty task."""
    code = (
        "import ray, time, logging; ray.init(log_to_driver=False, logging_level=logging.ERROR)\n"
        "task = ray.remote(num_cpus=1)(lambda: time.sleep(1))\nray.get([task.remote() for _ in range(2)])\n"
        "print('idle', flush=True); input()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    while child.stdout.readline().strip() != "idle":
        pass
    held = max(workers().values())
    child.communicate("\n")
    return held


def timed(fleet: Fleet, *how: str, environment: dict[str, str] | None = None) -> tuple[float, bytes]:
    """Return the seconds and the output of one reading of the whole fleet."""
    output = fleet.folder.with_name(f"out-{'-'.join(how).strip('-')}.json")
    began = time.perf_counter()
    patterns = [str(fleet.folder / name) for name in ("pods", "node-*/*/logs/*.err", "slurm")]
    command = [*oomguard_command(), "diagnose", "--format", "json", "--output", str(output), *how, *patterns]
    subprocess.run(command, check=True, env=environment)
    return time.perf_counter() - began, output.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=int, default=20_000, help="how many (default 20,000)")
    parser.add_argument("--size", type=float, default=5.0, metavar="GIB", help="of all together (default 5)")
    parser.add_argument("--rounds", type=int, default=1, help="readings each (default 1)")
    parser.add_argument("--keep", action="store_true", help="leave the logs in the temporary folder for another run")
    options = parser.parse_args()
    try:
        import ray  # noqa: F401
    except ImportError:
        skip("Ray is missing: pip install '.[ray]'")
    folder = Path(tempfile.gettempdir()) / f"oomguard-fleet-{VERSION}-{options.logs}-{options.size:g}"
    try:
        measure(make_fleet(folder / "logs", options.logs, int(options.size * 2**30)), options.rounds)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def measure(fleet: Fleet, rounds: int) -> None:
    """Read the fleet in all three ways and conclude."""
    print(f"{fleet.logs:,} logs, {fleet.size_bytes / 1e9:.2f} GB, load {os.getloadavg()[0]:.1f}", flush=True)
    one_s, one = timed(fleet, "--jobs", "1")  # it warms the page cache too
    two_s, ray_s, same, peak_bytes = [], [], True, 0
    with (
        tempfile.TemporaryDirectory(prefix="og-ray-", dir="/tmp") as temporary,
        cluster(Path(temporary)) as environment,
    ):
        idle = idle_bytes(environment)
        for number in range(rounds):
            took, output = timed(fleet, "--jobs", "2")
            two_s.append(took)
            same = same and output == one
            with Peak() as peak:
                took, output = timed(fleet, "--engine", "ray", environment=environment)
            ray_s.append(took)
            same, peak_bytes = same and output == one, max(peak_bytes, peak.bytes)
            print(
                f"round {number + 1}: --jobs 2 {two_s[-1]:.1f} s, Ray {ray_s[-1]:.1f} s, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    kinds = Counter(incident["kind"] for line in one.splitlines() for incident in json.loads(line)["incidents"])
    print(f"failures made {dict(fleet.kinds)}, found {dict(kinds)}")
    ratio = statistics.median(two / on_ray for two, on_ray in zip(two_s, ray_s, strict=True))
    above = (peak_bytes - idle) / 2**20
    print(f"one process {one_s:.0f} s, --jobs 2 {min(two_s):.0f} s, two Ray nodes {min(ray_s):.0f} s")
    conclude(
        f"{fleet.logs:,} logs, {fleet.size_bytes / 1e9:.2f} GB: two Ray nodes at {ratio:.2f} of --jobs 2 (goal >= {RATIO_GOAL}); "
        f"JSON {'identical' if same else 'DIFFERS'}; a worker {above:.0f} MiB above an idle one (goal <= {MEMORY_GOAL_MIB})",
        met=ratio >= RATIO_GOAL and same and above <= MEMORY_GOAL_MIB and kinds == fleet.kinds,
    )


if __name__ == "__main__":
    main()
