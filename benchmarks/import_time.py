"""Figure: what ``import oomguard`` costs beside ``python -c pass``; both run in turn, medians are compared."""

import statistics
import sys

from support.commands import seconds
from support.figure import conclude

ROUNDS, GOAL_MS = 30, 15


def main() -> None:
    nothing, ours = [sys.executable, "-c", "pass"], [sys.executable, "-c", "import oomguard"]
    for command in (nothing, ours):
        seconds(command)  # warm
    pairs = [(1000 * seconds(nothing), 1000 * seconds(ours)) for _ in range(ROUNDS)]
    base, own = (statistics.median(side) for side in zip(*pairs, strict=True))
    conclude(
        f"python -c pass {base:.1f} ms, import oomguard {own:.1f} ms: {own - base:.1f} ms more (goal <= {GOAL_MS})",
        met=own - base <= GOAL_MS,
    )


if __name__ == "__main__":
    main()
