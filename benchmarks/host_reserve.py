"""Figure: programs that fill a control group with 0.1 to 2 GiB/s under `oomguard run`: each must be
stopped before the kernel kills anything, nothing else may end, and the diagnosis must be right.

Rounds differ by limit, growth, and program: one that ends by SIGTERM, one that ignores it, two
processes, and one behind a shell. A process beside the run in the same group has to survive.
Skipped where no control group may be made. ``--resume FILE`` goes on where a run stopped.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.figure import conclude, skip
from support.host_limits import kernel_kills, limited_group, most_bytes, wrapped
from support.resume import Results
from support.supervising import RUN

HOG = Path(__file__).parent / "support" / "hog.py"
LIMITS_MIB = (768, 1024, 1536, 2048)
SHAPES = ("", "deaf", "twice", "deaf twice", "shell")
LONGEST_S = 3.0
ROUND_LIMIT_S = 120
COST_S = 60
GOAL_RATIO = 0.001
GOAL_MIB = 8
# The thread of a supervisor, and memory beside it: CPU seconds per second, and MiB more than before.
WATCHING = """
import mmap, os, sys, threading, time
before = os.sysconf("SC_PAGE_SIZE") * int(open("/proc/self/statm").read().split()[1])
from oomguard.supervisor.host_memory import GIB, MIB, HostWatch, resident_bytes
from oomguard.supervisor.messages import Messages
class Tree:
    pid = os.getpid()
took = []
watch = HostWatch(Tree(), Messages(), 2 * GIB)
def measured():
    watch._watch()
    took.append(time.thread_time())
watch._thread = threading.Thread(target=measured)
watch.start()
time.sleep(0.5)
beside = mmap.mmap(-1, 2900 * MIB)
beside.madvise(23)
more = resident_bytes(os.getpid()) - 2900 * MIB - before
time.sleep(float(sys.argv[1]))
watch.stop()
watch._thread.join()
print(took[0] / float(sys.argv[1]), more / MIB)
"""


def one_round(number: int, group: Path, limit_mib: int, folder: Path) -> dict[str, object]:
    """Run one round; return what was seen."""
    chance = random.Random(number)
    rate_gib = 0.1 * 20 ** chance.random()
    shape = SHAPES[number % len(SHAPES)]
    begin_mib = max(100, round(limit_mib * 0.8 - rate_gib * LONGEST_S * 1024))
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    hog = [sys.executable, str(HOG), f"{rate_gib:.3f}", str(begin_mib), str(2 * limit_mib)]
    command = [*hog, *shape.replace("shell", "").split()]
    if shape == "shell":
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    beside = subprocess.Popen(wrapped(group, ["sleep", "600"]))
    began_s = time.monotonic()
    try:
        ran = subprocess.run(
            wrapped(group, [*RUN, "--report", str(report), "--", *command]),
            capture_output=True,
            text=True,
            check=False,
            timeout=ROUND_LIMIT_S,  # the program waits longer
            cwd=folder,
        )
        survived = beside.poll() is None
    finally:
        beside.kill()
        beside.wait()
    incidents = json.loads(report.read_text())["incidents"] if report.exists() else []
    found = incidents[0] if incidents else {}
    causes = found.get("causes", [])
    growth = found.get("facts", {}).get("host_growth_bytes", 0)
    return {
        "rate_gib": round(rate_gib, 2),
        "shape": shape or "plain",
        "limit_mib": limit_mib,
        "status": ran.returncode,
        "kernel_kills": kernel_kills(group),
        "left_mib": limit_mib - (most_bytes(group) >> 20),
        "survived": survived,
        "kind": found.get("kind"),
        "rule": causes[0]["rule"] if causes else None,
        "growth_gib": round(growth / (1 << 30), 2),
        "full": "full" in ran.stdout,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def is_right(seen: dict[str, object]) -> bool:
    """Return whether a round ended as it must."""
    is_ended = seen["status"] in {143, 137} and not seen["full"]
    is_kept = seen["kernel_kills"] == 0 and seen["left_mib"] > 0 and seen["survived"]
    return bool(is_ended and is_kept and (seen["kind"], seen["rule"]) == ("host_oom", "OG412"))


def conclude_cost() -> None:
    """Print what the watching thread takes beside memory that is close to its limit."""
    with limited_group(5 * 1024) as group:
        if group is None:
            skip("this user may not make a control group")
        ran = subprocess.run(
            wrapped(group, [sys.executable, "-c", WATCHING, str(COST_S)]),
            capture_output=True,
            text=True,
            check=True,
        )
    ratio, mib = map(float, ran.stdout.split())
    conclude(
        f"watching close above a reserve of 2 GiB takes {ratio:.3%} of a core and {mib:.1f} MiB "
        f"(goal <= {GOAL_RATIO:.1%} and {GOAL_MIB} MiB)",
        met=ratio <= GOAL_RATIO and mib <= GOAL_MIB,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--cost", action="store_true", help="measure what the watching costs")
    arguments = parser.parse_args()
    if arguments.cost:
        conclude_cost()
    results = Results(arguments.resume)
    right = 0
    fastest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            seen = results.get(str(number))
            if seen is None:
                limit_mib = LIMITS_MIB[number % len(LIMITS_MIB)]
                with limited_group(limit_mib) as group:
                    if group is None:
                        skip("this user may not make a control group")
                    seen = one_round(number, group, limit_mib, Path(folder))
                results.add(str(number), seen)
            right += is_right(seen)
            fastest = max(fastest, seen["growth_gib"])
            if not is_right(seen):
                print(number, seen, flush=True)
    conclude(
        f"{right} of {arguments.rounds} programs with growth up to {fastest:.2f} GiB/s were ended "
        "before the kernel killed anything, and diagnosed (goal: all)",
        met=right == arguments.rounds,
    )


if __name__ == "__main__":
    main()
