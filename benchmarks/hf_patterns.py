"""Figure: 102 patterns of Hugging Face users under `oomguard.guard`, written by a tester who had
not seen how it works; 25 minutes.

Each is run in a process of its own: bare without a limit, then guarded under one where it fails
alone (a simulated device).
equal: the same result, type by type; refused: the first error with the reason in its notes;
    original error: no reason in them;
wrong: another result. data/hf_patterns has the tester's code; first.json has the outcomes of the
first run, before anything was built
for them, and bare.json what the bare side needed then, so that every run has the same limits. Needs
data/hf_patterns/requirements.txt.
"""

import argparse
import collections
import json
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.hf_pattern import DATA, LIBRARIES, observe
from support.resume import Results

OUTCOMES = ("equal", "refused", "original error", "wrong", "other error")
REFUSED_GOAL = 3


def first_outcomes() -> dict[str, dict[str, str]]:
    """The outcomes of the first run, by area and pattern."""
    return dict(json.loads((DATA / "first.json").read_text(encoding="utf-8")))


def counts(outcomes: list[str]) -> str:
    """How many there are of each outcome, those of no guard left out."""
    found = collections.Counter(outcomes)
    return ", ".join(f"{found[name]} {name}" for name in (*OUTCOMES, "dropped") if found[name])


def show(name: str, record: dict[str, Any], first: str) -> None:
    """One line a pattern: its outcome, that of the first run, and what is behind it."""
    last = record["outcome"]
    said = (
        record.get("why")
        or reason(record)
        or "; ".join(record.get("differences") or record.get("patches") or ())
    )
    print(f"{name:42} {last:15} first {first:15} {' '.join(str(said).split())[:160]}", flush=True)


def reason(record: dict[str, Any]) -> str:
    """Why a guard left a call alone, by its notes; what was raised where they do not say."""
    for note in record.get("notes") or ():
        for mark in ("not run in parts: ", "not automatic: ", "not solved"):
            if mark in note:
                return str(note[note.index(mark) :])
    return str(record.get("error") or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="areas, or names of patterns; none: all")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each pattern's result; those in it are not run again",
    )
    asked = parser.parse_args()
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        skip(f"not installed: {', '.join(missing)} (benchmarks/data/hf_patterns/requirements.txt)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    first = first_outcomes()
    known = Results(asked.resume)
    last: dict[str, list[str]] = {}
    before: dict[str, list[str]] = {}
    for area, names in first.items():
        for name in names:
            if asked.only and area not in asked.only and name not in asked.only:
                continue
            record = known.get(name)
            if record is None:
                record = observe(name)
                known.add(name, record)
            show(name, record, names[name])
            last.setdefault(area, []).append(record["outcome"])
            before.setdefault(area, []).append(names[name])
    if not last:
        parser.error("no such area or pattern")
    for area, outcomes in last.items():
        print(f"{area:10} {len(outcomes):3}: {counts(outcomes)}; first: {counts(before[area])}")
    every = [o for found in last.values() for o in found]
    those = [o for found in before.values() for o in found]
    met = set(every) <= {"equal", "refused"} and every.count("refused") <= REFUSED_GOAL
    conclude(
        f"{len(every)} patterns: {counts(every)}; first: {counts(those)} (goal: all equal, at "
        f"most {REFUSED_GOAL} refused with a reason)",
        met=met,
    )


if __name__ == "__main__":
    main()
