"""The whole command on one error log of 200 lines, warm, beside `python -c pass`: medians of runs in turn."""

import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from throughput import oomguard_command
from vllm_log import INCIDENTS, healthy

ROUNDS, GOAL_MS, LINES = 15, 250, 200


def error_log() -> str:
    """A start-up, some traffic, and the first of the incidents at the end: 200 lines."""
    failure = INCIDENTS[0][2].format(pid=4711, when="06-01 12:00:00").splitlines(keepends=True)
    lines = "".join(islice(healthy(seed=5), LINES)).splitlines(keepends=True)
    return "".join([*lines[: LINES - len(failure)], *failure])


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "error.log"
        path.write_text(error_log())
        ours = [*oomguard_command(), "diagnose", "--format", "json", str(path)]
        nothing = [sys.executable, "-c", "pass"]
        for command in (ours, nothing):
            seconds(command)  # warm
        pairs = [(seconds(nothing), seconds(ours)) for _ in range(ROUNDS)]
    base, own = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"python -c pass {base:.0f} ms, diagnose of {LINES} lines {own:.0f} ms: {own - base:.0f} ms more (goal <= {GOAL_MS})"
    )


if __name__ == "__main__":
    main()
