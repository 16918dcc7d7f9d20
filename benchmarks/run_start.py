"""Figure: how much later a command starts under `oomguard run` than bare, in the median of
alternating rounds.

The command prints the time at which it runs; the same command alone is taken off.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from support.commands import oomguard_command
from support.figure import conclude

GOAL_MS = 150
CLOCK = ["date", "+%s.%N"]


def started_after_ms(command: list[str], env: dict[str, str]) -> float:
    """Milliseconds from here to the time that the command prints."""
    began = time.time()
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return (float(printed) - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each (default 30)")
    rounds = parser.parse_args().rounds
    bare = []
    under = []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_STATE_HOME": str(Path(folder) / "state")}
        for _ in range(rounds + 1):  # the first one warms the caches
            bare.append(started_after_ms(CLOCK, env))
            under.append(started_after_ms([*oomguard_command(), "run", "-q", "--", *CLOCK], env))
    later = statistics.median(under[1:]) - statistics.median(bare[1:])
    conclude(
        f"a command starts {later:.0f} ms later under oomguard run, bare after "
        f"{statistics.median(bare[1:]):.0f} ms, {rounds} rounds "
        f"(goal <= {GOAL_MS} ms)",
        met=later <= GOAL_MS,
    )


if __name__ == "__main__":
    main()
