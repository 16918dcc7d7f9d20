"""Figure: what ``import oomguard`` costs beside ``python -c pass``; both run in turn, medians are
compared.
"""

import statistics
import sys

from support.commands import seconds
from support.figure import conclude

ROUNDS = 30
GOAL_MS = 15


def main() -> None:
    nothing = [sys.executable, "-c", "pass"]
    ours = [sys.executable, "-c", "import oomguard"]
    for command in (nothing, ours):
        seconds(command)  # warm
    pairs = [(1000 * seconds(nothing), 1000 * seconds(ours)) for _ in range(ROUNDS)]
    base, own = (statistics.median(side) for side in zip(*pairs, strict=True))
    conclude(
        f"python -c pass {base:.1f} ms, import oomguard {own:.1f} ms: {own - base:.1f} ms more "
        f"(goal <= {GOAL_MS})",
        met=own - base <= GOAL_MS,
    )


if __name__ == "__main__":
    main()
