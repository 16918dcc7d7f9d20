"""What a benchmark prints of testers' cases: a line each, and the figures beside their goals."""

import sys
from typing import Any

from support import stranger_judge as judge

ONCE_GOAL, KEPT_GOAL = 95, 97  # percent


def outcome(case: dict[str, Any], seen: dict[str, Any]) -> str:
    if not judge.is_broken_here(seen):
        return "starts as it is"
    if judge.can_run(case):
        if seen["runs"]:
            return "runs"
        return "FAILS"
    if seen["runs"]:
        return "RUNS"
    return "fails as it must"


def kept_text(case: dict[str, Any], share: float) -> str:
    """The share of the best value, or whether it is inside the tester's interval."""
    best = case["best"]
    if not judge.can_run(case):
        return "nothing to keep"
    if judge.is_exact(best):
        return f"{100 * share:.1f} % of {best['setting']} {best['value']}"
    if best["low"] is not None:
        interval = f"{best['low']} to {best['high']}"
    else:
        interval = f"{best['setting']} {best['value']}"
    return f"{'inside' if share == 1 else 'OUTSIDE'} {interval}"


def show(case: dict[str, Any], seen: dict[str, Any], reading: dict[str, Any]) -> None:
    """One line a case; where it does not run, the end of what it printed."""
    if seen["attempts"]:
        last = seen["attempts"][-1]
    else:
        last = {}
    changed = (
        ", ".join(f"{setting} {value}" for setting, value in last.items()) or "nothing changed"
    )
    cause = seen["cause"] or "none"
    if judge.is_broken_here(seen) and not judge.has_right_cause(case, seen, reading):
        mark = " (WRONG)"
    else:
        mark = ""
    if seen["served_max_model_len"]:
        served = f", serves {seen['served_max_model_len']}"
    else:
        served = ""
    broken = judge.forbidden(case, seen, reading)
    left = seen["left"]
    print(
        f"{case['name']:29} {case['surface']:12} {outcome(case, seen):16} {seen['relaunches']} "
        f"relaunch: {changed}{served}; "
        f"{kept_text(case, judge.kept(case, seen, reading))}; cause {cause}{mark}; "
        f"{'MUST NOT CHANGE ' + ', '.join(broken) if broken else 'permitted'}; "
        f"{seen['seconds']:.0f} s"
        f"{'; TIMED OUT' if seen['timed_out'] else ''}{f'; {left} processes LEFT' if left else ''}"
    )
    if seen[
        "error"
    ]:  # of those that have to fail too: that they failed for the right reason can be read
        print(seen["error"])
    sys.stdout.flush()


def figures(
    cases: list[dict[str, Any]], found: list[dict[str, Any]], reading: dict[str, Any]
) -> tuple[str, bool]:
    """The figures beside their goals, and whether they are met."""
    broken = [
        (case, seen) for case, seen in zip(cases, found, strict=True) if judge.is_broken_here(seen)
    ]
    right = sum(judge.has_right_cause(case, seen, reading) for case, seen in broken)
    in_one = [seen for case, seen in broken if case["fixable_in_one"]]
    once = sum(seen["runs"] and seen["relaunches"] == 1 for seen in in_one)
    repairable = [(case, seen) for case, seen in broken if judge.can_run(case)]
    shares = [judge.kept(case, seen, reading) for case, seen in repairable]
    if shares:
        kept = 100 * sum(shares) / len(shares)
    else:
        kept = 100.0
    unasked = sum(bool(judge.forbidden(case, seen, reading)) for case, seen in broken)
    alone = [seen for case, seen in broken if not judge.can_run(case)]
    print(
        f"{len(broken)} of {len(cases)} cases are broken here, {len(cases) - len(broken)} start as "
        "they are"
    )
    print(f"right cause in the first place: {right} of {len(broken)}")
    print(
        f"run in the end: {sum(seen['runs'] for _, seen in repairable)} of {len(repairable)} that "
        "can"
    )
    print(
        f"fail in the end: {sum(not seen['runs'] for seen in alone)} of {len(alone)} that nothing "
        "permitted repairs"
    )
    print(f"ended by the tester's time limit: {sum(seen['timed_out'] for _, seen in broken)}")
    text = (
        f"{once} of {len(in_one)} run after one relaunch, {kept:.1f} % kept in {len(shares)}, "
        f"changed without permission in {unasked} "
        f"(goal: one relaunch in >= {ONCE_GOAL} %, >= {KEPT_GOAL} % kept, 0 without permission)"
    )
    return text, bool(broken) and 100 * once >= ONCE_GOAL * len(
        in_one
    ) and kept >= KEPT_GOAL and unasked == 0
