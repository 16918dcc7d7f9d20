"""Figure: how fast output goes through `oomguard run` beside `tee`, to a reader behind a pipe; and
what it costs a Python child.

The child prints as fast as it can; the reader measures from the first byte to the last. Each run is
paired with one of tee, in turns who is first; the ratio is that of the pairs, with its 95 %
interval: on two shared cores either is at times twice as fast as at others. Anonymous memory is
that of oomguard without its command. The Python child tells how long its own 20,000 lines took.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude
from support.memory import anonymous_bytes
from support.paired import interval, trimmed

PLAIN_GOAL = 0.9
ANCHORS_GOAL = 0.5
MEMORY_GOAL_MIB = 60
PYTHON_GOAL = 1.1
HEALTHY = (
    "INFO 11-22 06:40:43 [loggers.py:127] Engine 000: Avg prompt throughput: 12.1 tokens/s, "
    "running 3 reqs\n"
)
ANCHOR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23 GiB\n"
)
PRINTER = """
import os, sys
line, size = sys.argv[1].encode().decode("unicode_escape").encode(), int(sys.argv[2])
block = line * ((1 << 18) // len(line))
for _ in range(size // len(block)):
    left = memoryview(block)
    while left:
        left = left[os.write(1, left):]
"""
PYTHON_CHILD = """
import sys, time
began = time.perf_counter()
for number in range(20_000):
    print("INFO 11-22 06:40:43 [loggers.py:127] line", number, "of a log that is as long as most lines of an engine's log are")
sys.stdout.flush()
print(time.perf_counter() - began, file=sys.stderr)
"""
POLL_S = 0.05


def read_all(fd: int) -> tuple[int, float]:
    """Bytes until the end, and the seconds from the first to the last."""
    buffer = bytearray(1 << 20)
    size = 0
    began = 0.0
    ended = 0.0
    while count := os.readv(fd, [buffer]):
        ended = time.perf_counter()
        began = began or ended
        size += count
    return size, ended - began


def through_tee(child: list[str]) -> float:
    """MiB a second through tee."""
    printer = subprocess.Popen(child, stdout=subprocess.PIPE)
    with printer, subprocess.Popen(["tee"], stdin=printer.stdout, stdout=subprocess.PIPE) as tee:
        printer.stdout.close()
        size, seconds = read_all(tee.stdout.fileno())
    return size / 2**20 / seconds


def through_run(child: list[str], env: dict[str, str]) -> tuple[float, int]:
    """MiB a second through oomguard run, and the most anonymous bytes that oomguard took."""
    peak = [0]
    over = threading.Event()
    with subprocess.Popen(
        [*oomguard_command(), "run", "-q", "--", *child], stdout=subprocess.PIPE, env=env
    ) as ours:

        def watch() -> None:
            while not over.wait(POLL_S):
                peak[0] = max(peak[0], anonymous_bytes(ours.pid, whole_tree=False))

        watcher = threading.Thread(target=watch)
        watcher.start()
        size, seconds = read_all(ours.stdout.fileno())
        over.set()
        watcher.join()
    if ours.returncode:
        raise SystemExit(f"oomguard run ended with {ours.returncode}")
    return size / 2**20 / seconds, peak[0]


def python_child(env: dict[str, str] | None = None) -> float:
    """Seconds in which a Python child printed its lines into a pipe that is read."""
    command = [sys.executable, "-c", PYTHON_CHILD]
    if env is not None:
        prefix = [*oomguard_command(), "run", "-q", "--"]
    else:
        prefix = []
    with subprocess.Popen(
        [*prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    ) as process:
        read_all(process.stdout.fileno())
        return float(process.stderr.read())


def told(name: str, logs: list[float]) -> float:
    """Print the ratio of the pairs and its interval; return it."""
    ratio = math.exp(trimmed(logs))
    (low, high) = interval(logs)
    print(
        f"{name}: ratio {ratio:.2f}, 95 % interval {low:.2f} to {high:.2f}, {len(logs)} pairs",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size",
        type=float,
        default=1.0,
        metavar="GIB",
        help="size of the output in GiB (default 1)",
    )
    parser.add_argument("--pairs", type=int, default=20, help="pairs of each (default 20)")
    options = parser.parse_args()
    size = int(options.size * 2**30)
    lines = {"plain lines": HEALTHY, "1 line in 10 an anchor line": HEALTHY * 9 + ANCHOR}
    ratios = {}
    peak = 0
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": str(Path(folder) / "state")}
        for name, line in lines.items():
            child = [sys.executable, "-c", PRINTER, line.replace("\n", "\\n"), str(size)]
            logs = []
            fastest = [0.0, 0.0]
            for number in range(options.pairs):
                if number % 2:
                    tee = through_tee(child)
                else:
                    tee = 0.0
                speed, anonymous = through_run(child, env)
                tee = tee or through_tee(child)
                logs.append(math.log(speed / tee))
                fastest = [max(fastest[0], speed), max(fastest[1], tee)]
                peak = max(peak, anonymous)
            ratios[name] = told(
                f"{name}: at most {fastest[0]:.0f} MiB/s, tee {fastest[1]:.0f} MiB/s", logs
            )
        logs = []
        for number in range(options.pairs):
            if number % 2:
                plain = python_child()
            else:
                plain = 0.0
            under = python_child(env)
            logs.append(math.log(under / (plain or python_child())))
    python = told("seconds for 20,000 lines of a Python child, under run and plain", logs)
    plain_ratio, anchors_ratio = ratios.values()
    conclude(
        f"of tee's speed: {plain_ratio:.2f} (goal >= {PLAIN_GOAL}), with anchors "
        f"{anchors_ratio:.2f} (goal >= {ANCHORS_GOAL}); "
        f"anonymous memory {peak / 2**20:.0f} MiB (goal <= {MEMORY_GOAL_MIB}); Python child "
        f"{python:.2f} (goal <= {PYTHON_GOAL})",
        met=plain_ratio >= PLAIN_GOAL
        and anchors_ratio >= ANCHORS_GOAL
        and peak <= MEMORY_GOAL_MIB * 2**20
        and python <= PYTHON_GOAL,
    )


if __name__ == "__main__":
    main()
