"""The command line and the loop of benchmarks over generated cases: each by its number and a seed,
on several processes.
"""

import argparse
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.batch_tools import TOOLS, figures
from support.case_workers import run_cases
from support.figure import skip
from support.resume import Results

AT_ONCE_GOAL, KEPT_GOAL = (
    95,
    97,
)  # percent of the cases with at most one failed attempt; of the largest feasible batch
_LEAST_RATIO = 0.97
_GPU_CASE_LIMIT_S = 60


def used_cases(
    purpose: str,
    cases: int,
    run_case: Callable[..., dict[str, Any]],
    is_odd: Callable[[dict[str, Any]], bool] = lambda _: False,
    *,
    load: Callable[..., object] | None = None,
    per_worker: int = 20,
    devices: Sequence[str] = (),
) -> tuple[list[dict[str, Any]], int]:
    """Run the cases that the command line asks for; return those that fail when they run whole, and
    how many do not.

    Args:
        purpose: the benchmark's docstring.
        cases: how many there are, unless the command line says otherwise.
        run_case: runs one, by its number and the seed.
        is_odd: whether a case is worth a line beside those that the guard gave up, or failed more
            than once, or kept less of.
        load: run by each process before its first case.
        per_worker: cases after which a process is replaced.
        devices: what cases can run on, the usual first; ``run_case`` and ``load`` take its name as
            ``device``.
    """
    parser = argparse.ArgumentParser(description=purpose.splitlines()[0])
    parser.add_argument(
        "--cases",
        type=int,
        default=cases,
        help="cases to generate; those that fit whole or not at all are left out",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case by its number")
    parser.add_argument(
        "--resume",
        type=Path,
        help="a file that keeps each case's result; cases in it are not run again",
    )
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="cases that run at once"
    )
    parser.add_argument(
        "--case-limit-s", type=float, help="seconds after which a case counts as given up"
    )
    parser.add_argument(
        "--minutes", type=float, help="begin no case after so many; conclude with those that ran"
    )
    if devices:
        parser.add_argument("--device", choices=devices, default=devices[0])
    asked = parser.parse_args()
    device = getattr(asked, "device", None)
    case_limit_s = asked.case_limit_s
    if device == "cuda":
        case_limit_s = case_limit_s or _GPU_CASE_LIMIT_S
    if device is not None:
        run_case = functools.partial(run_case, device=device)
        load = load and functools.partial(load, device=device)
    if device == "cuda":
        on = f"{device}/"
    else:
        on = ""
    if asked.only is not None:
        numbers = [asked.only]
    else:
        numbers = range(asked.cases)
    known = Results(asked.resume)
    results = [found for n in numbers if (found := known.get(f"{on}{asked.seed}/{n}"))]
    left = [(n, asked.seed) for n in numbers if known.get(f"{on}{asked.seed}/{n}") is None]
    for found in run_cases(
        run_case,
        left,
        workers=asked.workers,
        load=load,
        per_worker=per_worker,
        case_limit_s=case_limit_s,
        minutes=asked.minutes,
    ):
        results.append(found)
        known.add(f"{on}{asked.seed}/{found['number']}", found)
        if "oomguard" in found and (_is_short(found) or is_odd(found)):
            print(json.dumps({k: v for k, v in found.items() if k != "capacity"}), flush=True)
    if len(results) < len(numbers):
        print(
            f"{len(numbers) - len(results)} cases were not begun: the {asked.minutes:g} minutes "
            "were over"
        )
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
