"""Figure: vLLM started in the user's own process under `oomguard.guard`, configurations that a tester broke; half an hour for 24.

Each script, its best value and what it permits is a tester's (data/guarded_24, and five more, each written while what the one before
had shown was mended), who had read the page on the guard and no code. Counted are the right cause, one new start where the tester
says that one is enough, the share of the best value kept, what was changed that must not be, and, where nothing permitted helps,
that the script got the engine's own exception.
"""

import functools
import sys

from support.case_options import asked_cases
from support.figure import conclude
from support.guarded_run import observe_guarded, with_permission
from support.stranger_case import read_reading
from support.stranger_report import figures, show

SETS = ("guarded_24", "guarded_second", "guarded_third", "guarded_fourth", "guarded_fifth", "guarded_sixth")


def main() -> None:
    cases, known = asked_cases(__doc__, SETS)
    cases = [with_permission(case) for case in cases]
    reading, found = read_reading(cases[0]["set"]), []
    for case in cases:
        seen = known.kept(case["name"], functools.partial(observe_guarded, case))
        found.append(seen)
        show(case, seen, reading)
        if seen["printed"]:
            print("   ", "; ".join(seen["printed"]))
    to_hand_back = [seen for case, seen in zip(cases, found, strict=True) if "unfixable" in case["causes"]]
    print(f"got the engine's exception: {sum(seen['handed_back'] for seen in to_hand_back)} of {len(to_hand_back)}")
    sys.stdout.flush()
    text, met = figures(cases, found, reading)
    conclude(text, met=met and all(seen["handed_back"] for seen in to_hand_back))


if __name__ == "__main__":
    main()
