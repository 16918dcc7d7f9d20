"""Figure: what a guarded call that succeeds costs beside ``tenacity.retry``; both run in turn, medians are compared.

The function returns its argument, so that everything above its own call is the decorator's.
"""

import statistics
import time
from collections.abc import Callable

import tenacity

import oomguard
from support.figure import conclude

ROUNDS, CALLS, GOAL = 31, 2000, 1 / 10


def plain(x: int) -> int:
    return x


guarded, retried = oomguard.guard(plain), tenacity.retry(plain)


def microseconds(function: Callable[[int], int]) -> float:
    """Return the mean of one call."""
    began = time.perf_counter()
    for number in range(CALLS):
        function(number)
    return 1e6 * (time.perf_counter() - began) / CALLS


def main() -> None:
    functions = (plain, guarded, retried)
    for function in functions:
        microseconds(function)  # warm
    rounds = [[microseconds(function) for function in functions] for _ in range(ROUNDS)]
    bare, own, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = (own - bare) / (theirs - bare)
    conclude(
        f"a call {bare:.2f} us, under oomguard.guard {own:.2f} us, under tenacity.retry {theirs:.2f} us: "
        f"what is added is 1/{1 / ratio:.1f} of tenacity's (goal <= 1/{1 / GOAL:.0f})",
        met=ratio <= GOAL,
    )


if __name__ == "__main__":
    main()
