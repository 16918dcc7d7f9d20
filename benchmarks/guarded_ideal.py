"""Figures: patterns of Hugging Face users under the guard beside the ideal, and their outcomes.

All patterns run in one process, each on a simulated device where its call fails alone. The ideal
is the largest size that fits, run directly, part by part. Times are processor seconds of the user's
call, after a first guarded run that loads what a failure needs. A pattern counts for the times if
the guard changed nothing but the number of rows. Needs data/hf_patterns/requirements.txt.
"""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from support.figure import conclude, skip
from support.resume import Results

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
DATA = Path(__file__).parent / "data" / "hf_patterns"
FIRST_GOALS = (1.4, 2.0)  # median and 90th percentile
SECOND_GOAL = 1.1
PARTS_GOAL = 0.85
PATTERN_LIMIT_S = 900  # of a run on a loaded machine


def timed(pattern: Any, seconds: list[float], calls: int = 1) -> Any:
    """Return the pattern with a call that runs several times and notes the seconds of each."""

    def build(size: int) -> Any:
        job = pattern.build(size)

        def call() -> Any:
            for _ in range(calls):
                began_s = time.process_time()
                result = job.call()
                seconds.append(time.process_time() - began_s)
            return result

        return dataclasses.replace(job, call=call)

    return dataclasses.replace(pattern, build=build)


def ideal_s(harness: Any, pattern: Any, capacity: int) -> tuple[int, float]:
    """Return the largest size that fits, and the seconds of the call in such parts."""
    times: dict[int, float] = {}

    def fits(size: int) -> bool:
        seconds: list[float] = []
        if harness.run(timed(pattern, seconds), size, capacity).error is not None:
            return False
        times[size] = seconds[0]
        return True

    low, high = 0, pattern.rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return 0, 0.0
    parts, rest = divmod(pattern.rows, low)
    again: list[float] = []
    harness.run(timed(pattern, again), low, capacity)
    total = parts * min([times[low], *again] if low in times else again)
    if rest and (rest in times or fits(rest)):
        total += times[rest]
    return low, total


def observe(harness: Any, pattern: Any, checked: dict[str, Any] | None) -> dict[str, Any]:
    """Return the outcome of a pattern, and its times if only its rows were changed."""
    record = harness.judge(pattern, checked)
    patches = record.get("patches") or []
    by_rows = all(patch.startswith("batch_size ") for patch in patches)
    if record["outcome"] != "equal" or not patches or not by_rows:
        return record
    try:
        most, ideal = ideal_s(harness, pattern, record["limit"])
    except IndexError:  # the pattern's texts come in fours, so it has no other sizes
        return record
    seconds: list[float] = []
    parts: list[int] = []
    from oomguard.guarding import micro_batch

    run_rows = micro_batch.run_rows

    def noted(wrapped: Any, call: Any, start: int, stop: int) -> Any:
        result, error = run_rows(wrapped, call, start, stop)
        if error is None and not seconds:  # a part of the first call
            parts.append(stop - start)
        return result, error

    micro_batch.run_rows = noted
    try:
        ran = harness.run(timed(pattern, seconds, 2), pattern.rows, record["limit"], guard=True)
    finally:
        micro_batch.run_rows = run_rows
    if most == 0 or ran.error is not None or len(seconds) != 2:
        return record
    attempts = record.get("attempts") or []
    failed = sum(one != "ran" for one in attempts)
    again = sum(one != "ran" for one in ran.hooks.get("attempts") or [])
    return {
        **record,
        "ideal_s": ideal,
        "first_s": seconds[0],
        "second_s": seconds[1],
        "failed": failed,
        "failed_again": again - failed,
        "most": most,
        "parts": parts,
    }


def main() -> None:
    """Run the patterns of a set, print a line for each, and conclude."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", type=Path, default=DATA, help="the folder of the patterns")
    parser.add_argument("--resume", type=Path, help="a file that keeps each pattern's result")
    parser.add_argument("--every", type=int, default=1, help="one of so many patterns")
    parser.add_argument("--minutes", type=float, help="begin no pattern after so many")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(asked.set), str(DATA)]
    try:
        import torch
    except ImportError:
        skip("torch is not installed")
    torch.set_num_threads(1)
    import harness
    from registry import PATTERNS

    harness.SECONDS = PATTERN_LIMIT_S
    for path in sorted(asked.set.glob("patterns_*.py")):
        importlib.import_module(path.stem)
    bare = json.loads((asked.set / "bare.json").read_text(encoding="utf-8"))
    known = Results(asked.resume)
    began_s = time.monotonic()
    records = []
    for name, pattern in list(PATTERNS.items())[:: asked.every]:
        checked = bare.get(name)
        if checked is None or checked["outcome"] != "bare side good":
            continue
        record = known.get(name)
        if record is None and asked.minutes and time.monotonic() - began_s > 60 * asked.minutes:
            continue
        if record is None:
            record = observe(harness, pattern, checked)
            known.add(name, record)
        records.append(record)
        times = ""
        if "first_s" in record:
            ideal = record["ideal_s"]
            times = (
                f"{record['first_s'] / ideal:.2f} {record['second_s'] / ideal:.2f} of {ideal:.3f} s"
            )
        print(f"{name:42} {record['outcome']:15} {times}", flush=True)
    report(records)


def report(records: list[dict[str, Any]]) -> None:
    """Print the counts and ratios, and conclude."""
    outcomes = [record["outcome"] for record in records]
    measured = [record for record in records if "first_s" in record]
    if not measured:
        skip("no pattern was split into rows")
    first = sorted(record["first_s"] / record["ideal_s"] for record in measured)
    second = [record["second_s"] / record["ideal_s"] for record in measured]
    tenth = first[min(len(first) - 1, round(0.9 * len(first)))]
    failed = [record["failed"] for record in measured]
    again = sum(record["failed_again"] for record in measured)
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
    print(
        f"{len(records)} patterns: {counts}; of {len(measured)} split into rows "
        f"{sum(one <= 1 for one in failed)} failed once, {sum(one <= 2 for one in failed)} at most "
        f"twice; second calls failed {again} times"
    )
    shares = [
        statistics.fmean(record["parts"][1:]) / record["most"]
        for record in measured
        if len(record.get("parts", [])) > 1
    ]
    if shares:
        print(
            "rows of all parts but the first, share of the largest that fit: "
            f"{statistics.fmean(shares):.0%} (goal {PARTS_GOAL:.0%})"
        )
    conclude(
        f"guarded call beside the ideal: median {statistics.median(first):.2f}, 90th percentile "
        f"{tenth:.2f} (goals {FIRST_GOALS[0]} and {FIRST_GOALS[1]}), second call "
        f"{statistics.median(second):.2f} (goal {SECOND_GOAL})",
        met=statistics.median(first) <= FIRST_GOALS[0]
        and tenth <= FIRST_GOALS[1]
        and statistics.median(second) <= SECOND_GOAL
        and "wrong" not in outcomes,
    )


if __name__ == "__main__":
    main()
