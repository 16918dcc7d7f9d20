"""Figure: faults injected into every function that a run reaches, at its first and at a later call:
status and output are kept.

The functions come from a trace of each scenario. Each fails by an exception, by an exit, by a hang
and for want of memory. ``--sample N`` takes N of all, and ``--resume FILE`` goes on where a run
stopped.
"""

import argparse
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.faults import KINDS, SCENARIOS, problem, reached
from support.figure import conclude
from support.resume import Results

GOAL = 0.995


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="so many of all faults")
    parser.add_argument("--kind", choices=KINDS, help="faults of this kind only")
    parser.add_argument(
        "--inside", default="", help="functions of files whose path begins with this"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--resume", type=Path)
    arguments = parser.parse_args()
    results = Results(arguments.resume)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = []
        for number, scenario in enumerate(SCENARIOS):
            (folder / str(number)).mkdir()
            rounds += [
                (scenario, {"function": function, "call": call, "kind": kind})
                for function, call in reached(scenario, folder / str(number))
                if function.startswith(arguments.inside)
                for kind in KINDS
                if arguments.kind in (None, kind)
            ]
        total = len(rounds)
        if arguments.sample is not None:
            rounds = random.Random(total + arguments.seed).sample(
                rounds, min(total, arguments.sample)
            )

        def one(index: int) -> tuple[str, str | None]:
            scenario, fault = rounds[index]
            key = f"{scenario.name}: {fault['function']} call {fault['call']}: {fault['kind']}"
            found = results.get(key)
            if found is None:
                place = folder / f"round-{index}"
                place.mkdir()
                found = problem(scenario, fault, place) or ""
                results.add(key, found)
            return key, found or None

        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = list(pool.map(one, range(len(rounds))))
    broken = [(key, what) for key, what in found if what is not None]
    for key, what in broken:
        print(f"{key}\n    {what}")
    kept = 1 - len(broken) / max(1, len(found))
    conclude(
        f"{len(found)} of {total} faults: status and output kept in {100 * kept:.2f} % (goal >= "
        f"{100 * GOAL:.1f} %)",
        met=kept >= GOAL,
    )


if __name__ == "__main__":
    main()
