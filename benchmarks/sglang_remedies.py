"""Figure: SGLang's failures, rendered from its sources over versions and moments: the right
setting, its direction and its value.

The logs and their right answers stand in data/sglang_failures.toml, with the equation behind each
value. Of a plan the first setting counts. Where no setting helps, a plan that changes none is
right. The same logs cut to their last lines, as people paste them, have to give the setting at
least. With -v every miss is listed.
"""

import argparse
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from oomguard.core.incident import Incident, Patch
from oomguard.core.settings import table_of
from oomguard.diagnosis import diagnose
from support.figure import conclude

DATA = Path(__file__).parent / "data" / "sglang_failures.toml"
KNOB_GOAL = 1.0
VALUE_GOAL = 0.6
MISSING_GOAL = 1.0
CUT_GOAL = 0.9
LAST_LINES = 8
# Settings that SGLang reads from an environment variable or from torch's.
NAMES = {
    "flashinfer_workspace_bytes": "SGLANG_FLASHINFER_WORKSPACE_SIZE",
    "allocator_options": "PYTORCH_CUDA_ALLOC_CONF",
    "disable_prefill_graphs": "disable_prefill_cuda_graph",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="list every miss")
    options = parser.parse_args()
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    cut: Counter[str] = Counter()
    for case in data["case"]:
        if "start" in case:
            start = data["starts"][case["start"]]["lines"].lstrip("\n")
        else:
            start = ""
        log = start + case["log"].lstrip("\n")
        judge(case, log, counts[case["phase"]], verbose=options.verbose)
        judge(case, "\n".join(log.splitlines()[-LAST_LINES:]), cut, verbose=False)
    for phase, count in counts.items():
        print(
            f"{phase:10} setting {count['right']:2} of {count['cases']:2}, value "
            f"{count['value']:2} of {count['values']:2},"
            f" missing fact named {count['named']} of {count['missing']}"
        )
    all_of = sum(counts.values(), Counter())
    versions = len({case["version"] for case in data["case"]})
    knob = all_of["right"] / all_of["cases"]
    value = all_of["value"] / all_of["values"]
    named = all_of["named"] / all_of["missing"]
    cut_knob = cut["right"] / cut["cases"]
    print(
        f"of their last {LAST_LINES} lines alone: right setting {cut_knob:.1%} (goal >= "
        f"{CUT_GOAL:.0%})"
    )
    conclude(
        f"{all_of['cases']} failures of SGLang in {versions} versions: right setting and direction "
        f"{knob:.1%}"
        f" (goal {KNOB_GOAL:.0%}), value {value:.1%} of {all_of['values']} (goal >= "
        f"{VALUE_GOAL:.0%}), missing fact named"
        f" {named:.1%} of {all_of['missing']} (goal {MISSING_GOAL:.0%})",
        met=knob >= KNOB_GOAL
        and value >= VALUE_GOAL
        and named >= MISSING_GOAL
        and cut_knob >= CUT_GOAL,
    )


def judge(case: dict[str, Any], log: str, count: Counter[str], *, verbose: bool) -> None:
    """Diagnose one log and count what of its plan is right."""
    incident = next((found for found in diagnose(log).incidents if found.is_oom), None)
    if incident is not None:
        plan = incident.plan
    else:
        plan = ()
    right = incident is not None and is_right(plan, case["right"])
    solved = "between" in case and incident is not None and is_solved(plan, case)
    named = "missing" in case and incident is not None and case["missing"] in told_missing(incident)
    count.update(
        cases=1,
        right=right,
        values="between" in case,
        value=solved,
        missing="missing" in case,
        named=named,
    )
    if verbose and not (right and solved >= ("between" in case) and named >= ("missing" in case)):
        shown = [(spelled(patch), patch.old, patch.new) for patch in plan]
        if incident is None:
            told = "not found"
        else:
            told = f"{incident.kind} {incident.phase} {shown} {incident.unknown}"
        print(
            f"  {case['name']} ({case['version']}): {told}; right: {case['right']} "
            f"{case.get('between', '')}"
        )


def is_right(plan: tuple[Patch, ...], right: list[str]) -> bool:
    """Return whether the first setting of a plan is one that helps, turned the right way."""
    if not right:
        return all(patch.new is None for patch in plan)
    if not plan:
        return False
    directions = dict(row.rsplit(" ", 1) for row in right)
    wanted = directions.get(spelled(plan[0]))
    return wanted is not None and turned(plan[0], wanted)


def turned(patch: Patch, wanted: str) -> bool:
    """Return whether a patch turns its setting the wanted way; one whose value is not known turns
    none.
    """
    numbers = [value for value in (patch.old, patch.new) if isinstance(value, (int, float))]
    if len(numbers) < 2 or isinstance(patch.new, bool):
        return True
    if wanted == "increase":
        return numbers[1] > numbers[0]
    return wanted == "set" or numbers[1] < numbers[0]


def is_solved(plan: tuple[Patch, ...], case: dict[str, Any]) -> bool:
    """Return whether the plan has the first right setting with a value within its bounds."""
    name = case["right"][0].rsplit(" ", 1)[0]
    (low, high) = case["between"]
    return any(
        isinstance(p.new, (int, float)) and spelled(p) == name and low <= p.new <= high
        for p in plan
    )


def spelled(patch: Patch) -> str:
    """Return a setting as SGLang spells it."""
    row = table_of("sglang", "settings").get(patch.setting, {})
    return NAMES.get(patch.setting, str(row.get("kwarg", patch.setting)))


def told_missing(incident: Incident) -> str:
    """Return all that a diagnosis says is not known."""
    if incident.missing is not None:
        what = incident.missing.what
    else:
        what = ""
    return "\n".join((*incident.unknown, what))


if __name__ == "__main__":
    main()
