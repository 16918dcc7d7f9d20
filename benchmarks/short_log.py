"""Figure: time of the whole command on an error log of 200 lines beside `python -c pass`, or beside
another checkout's.

Both run in turn, warm; medians are compared. With --beside PATH the two checkouts run in turn under
this Python, each with a cache of its own, and the figure is the median of the differences in
processor time with its 95 % interval.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import islice
from pathlib import Path

from support.commands import ROOT, of_checkout, oomguard_command, processor_seconds, seconds
from support.figure import conclude
from support.vllm_log import INCIDENTS, healthy

ROUNDS = 15
GOAL_MS = 150
LINES = 200
ROUNDS_BESIDE, RANK_95 = (
    40,
    14,
    # of 40 values the 14th and the 27th hold the median at 96 % (binomial), the 15th and 26th at 92 %
)


def error_log() -> str:
    """A start-up, some traffic, and the first of the incidents at the end: 200 lines."""
    failure = INCIDENTS[0][2].format(pid=4711, when="06-01 12:00:00").splitlines(keepends=True)
    lines = "".join(islice(healthy(seed=5), LINES)).splitlines(keepends=True)
    return "".join([*lines[: LINES - len(failure)], *failure])


def beside_nothing(log: Path) -> None:
    ours = [*oomguard_command(), "diagnose", "--format", "json", str(log)]
    nothing = [sys.executable, "-c", "pass"]
    for command in (ours, nothing):
        seconds(command)  # warm
    pairs = [(seconds(nothing), seconds(ours)) for _ in range(ROUNDS)]
    base, own = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    conclude(
        f"python -c pass {base:.0f} ms, diagnose of {LINES} lines {own:.0f} ms: {own - base:.0f} "
        f"ms more (goal <= {GOAL_MS})",
        met=own - base <= GOAL_MS,
    )


def beside_checkout(log: Path, other: Path, caches: Path) -> None:
    command = [sys.executable, "-P", "-m", "oomguard", "diagnose", "--format", "json", str(log)]
    environments = of_checkout(other, caches / "other"), of_checkout(ROOT, caches / "own")
    for environment in environments * 2:
        seconds(command, environment)  # warm: the first run parses the rules
    pairs = []
    for number in range(ROUNDS_BESIDE):  # in turn, and each of them first in every other round
        if number % 2:
            order = (0, 1)
        else:
            order = (1, 0)
        took = {side: 1000 * processor_seconds(command, environments[side]) for side in order}
        pairs.append((took[0], took[1]))
    theirs, own = (statistics.median(side) for side in zip(*pairs, strict=True))
    differences = sorted(mine - other for other, mine in pairs)
    low = differences[RANK_95 - 1]
    high = differences[-RANK_95]
    conclude(
        f"processor time of diagnose of {LINES} lines {own:.0f} ms, of the other checkout "
        f"{theirs:.0f} ms: "
        f"{statistics.median(differences):+.1f} ms ({low:+.1f} to {high:+.1f}; goal: no slower, "
        "so an interval that reaches 0)",
        met=low <= 0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="PATH",
        help="another checkout, such as the commit before a change",
    )
    other = parser.parse_args().beside
    if other is not None and not (other / "oomguard").is_dir():
        parser.error(f"{other} is no checkout: it has no folder oomguard")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "error.log"
        path.write_text(error_log())
        if other is None:
            beside_nothing(path)
        else:
            beside_checkout(path, other, Path(folder))


if __name__ == "__main__":
    main()
