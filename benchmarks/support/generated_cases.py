"""The command line and the loop of benchmarks over generated cases: each by its number and a seed, on two processes."""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.batch_tools import TOOLS, figures
from support.figure import skip
from support.resume import Results

AT_ONCE_GOAL, KEPT_GOAL = 95, 97  # percent of the cases with at most one failed attempt; of the largest feasible batch
_LEAST_RATIO = 0.97


def used_cases(
    purpose: str,
    cases: int,
    run_case: Callable[[tuple[int, int]], dict[str, Any]],
    is_odd: Callable[[dict[str, Any]], bool] = lambda _: False,
    *,
    load: Callable[[], object] | None = None,
    per_worker: int = 20,
) -> tuple[list[dict[str, Any]], int]:
    """Run the cases that the command line asks for; return those that fail when they run whole, and how many do not.

    Args:
        purpose: the benchmark's docstring.
        cases: how many there are, unless the command line says otherwise.
        run_case: runs one, by its number and the seed.
        is_odd: whether a case is worth a line beside those that the guard gave up, or failed more than once, or kept less of.
        load: run by each process before its first case.
        per_worker: cases after which a process is replaced.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=cases, help="cases to generate; those that fit whole or not at all are left out"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case by its number")
    parser.add_argument(
        "--resume", type=Path, help="a file that keeps each case's result; cases in it are not run again"
    )
    asked = parser.parse_args()
    numbers = [asked.only] if asked.only is not None else range(asked.cases)
    known = Results(asked.resume)
    results = [found for n in numbers if (found := known.get(f"{asked.seed}/{n}"))]
    left = [(n, asked.seed) for n in numbers if known.get(f"{asked.seed}/{n}") is None]
    workers = min(2, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers, load, maxtasksperchild=per_worker) as pool:
        for found in pool.imap_unordered(run_case, left):
            results.append(found)
            known.add(f"{asked.seed}/{found['number']}", found)
            if "oomguard" in found and (_is_short(found) or is_odd(found)):
                print(json.dumps({k: v for k, v in found.items() if k != "capacity"}), flush=True)
    used = [r for r in results if "oomguard" in r]
    if not used:
        skip("no case among these fails when it runs whole")
    return used, len(results) - len(used)


def _is_short(found: dict[str, Any]) -> bool:
    ran = found["oomguard"]
    return not ran or ran[0] > 1 or ran[1] < _LEAST_RATIO * found["feasible"]


def told(used: list[dict[str, Any]]) -> tuple[str, bool]:
    """Print the peers' lines; return the guard's, and whether it meets its goals."""
    for peer in TOOLS:
        if peer != "oomguard":
            ran = any(r.get(peer) for r in used)
            print(figures(peer, used)[0] if ran else f"{peer}: {used[0].get(f'{peer}_error')}")
    line, at_once, kept = figures("oomguard", used)
    line = f"{line} (goal: at most one in >= {AT_ONCE_GOAL} %, >= {KEPT_GOAL} % kept)"
    return line, at_once >= AT_ONCE_GOAL and kept >= KEPT_GOAL
