"""Figure: what ``oomguard.guard`` adds to a Ray task that succeeds, as a share of an empty task on a local cluster.

Two empty tasks differ by more than the goal from run to run. So what the guard adds is measured where it is added: in the worker,
around the very function that Ray sent there, by processor time; it is set beside the time of an empty task, asked for and waited
for one at a time. Both kinds of task are also run in turn, for the reader.
"""

import argparse
import logging
import statistics
import tempfile
import time
import timeit
from typing import Any

from support.figure import conclude, skip

GOAL, CALLS = 0.01, 20_000


def seconds_each(task: Any, ray: Any, tasks: int) -> float:
    """Return the mean of one task, asked for and waited for."""
    began = time.perf_counter()
    for _ in range(tasks):
        ray.get(task.remote())
    return (time.perf_counter() - began) / tasks


def measure(ray: Any, rounds: int, tasks: int) -> None:
    """Run both in turn and conclude."""
    import oomguard

    def empty() -> None:
        return None

    guarded_empty = oomguard.guard(empty)

    @ray.remote
    def added() -> float:
        """Return the seconds that the guard adds to one call, as Ray's worker runs it."""
        guarded_empty()  # what is loaded once is loaded
        times = [
            min(timeit.repeat(function, timer=time.thread_time, number=CALLS, repeat=7)) / CALLS
            for function in (empty, guarded_empty)
        ]
        return times[1] - times[0]

    plain, below, above = ray.remote(empty), ray.remote(guarded_empty), oomguard.guard(ray.remote(empty))
    for task in (plain, below, above):
        seconds_each(task, ray, 50)
    taken: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for times, task in zip(taken, (plain, below, above), strict=True):
            times.append(seconds_each(task, ray, tasks))
    bare, inside, around = (statistics.median(times) for times in taken)
    print(
        f"a task: plain {1e6 * bare:.0f} us, guarded below @ray.remote {1e6 * inside:.0f} us, above it {1e6 * around:.0f} us"
    )
    added_s = ray.get(added.remote())
    share = added_s / min(taken[0])
    conclude(
        f"the guard adds {1e6 * added_s:.2f} us to an empty Ray task of {1e6 * min(taken[0]):.0f} us: "
        f"{100 * share:.2f} % (goal <= {100 * GOAL:.0f} %)",
        met=share <= GOAL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each kind in turn (default 9)")
    parser.add_argument("--tasks", type=int, default=200, help="a round (default 200)")
    options = parser.parse_args()
    try:
        import ray
    except ImportError:
        skip("Ray is missing: pip install '.[ray]'")
    with tempfile.TemporaryDirectory(prefix="og-ray-") as folder:
        ray.init(
            num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder
        )
        try:
            measure(ray, options.rounds, options.tasks)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
