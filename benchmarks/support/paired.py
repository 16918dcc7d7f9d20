"""The ratio of two timings that are taken in pairs, side by side, and how sure it is."""

import math
import random
import statistics

TRIMMED = 0.1
RESAMPLES = 4000


def trimmed(logs: list[float]) -> float:
    """The mean without the outermost tenth on each side."""
    cut = int(len(logs) * TRIMMED)
    return statistics.fmean(sorted(logs)[cut : len(logs) - cut])


def interval(logs: list[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the ratio, by bootstrap over the pairs."""
    draw = random.Random(seed)
    found = sorted(trimmed(draw.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(found[int(0.025 * RESAMPLES)]), math.exp(found[int(0.975 * RESAMPLES)])
