"""Figure: forecasts of full host memory, on 100 made series of memory and 50 healthy ones.

Growing series (linear, in steps, with teeth on a rising floor, from a late start) have to be
announced at least 6 hours before memory is full, with the right time within 20 percent. Healthy
ones (plateaus, warm-up, saw-teeth, growth that saturates, daily waves) must cause no line. A cache
that fills evenly beyond 75 percent of the limit looks like a leak, so the made caches stay below.
"""

import argparse
import math
import random
from collections.abc import Callable, Iterator

from oomguard.analyst.host_trend import SAMPLE_S, Trend
from support.figure import conclude

HOUR_S = 3600.0
LIMIT = 64 << 30
GOAL_AHEAD_S = 6 * HOUR_S
GOAL_ERROR = 0.2
GOAL_RATIO = 0.9
LOOK_SAMPLES = 10  # a forecast each minute would take an hour here
STEPS_S = (24 * HOUR_S, HOUR_S)
Series = Callable[[float], float]


def growing(chance: random.Random) -> tuple[str, Series]:
    """Return a series that fills the memory, as a part of the limit by hours."""
    begin = chance.uniform(0.2, 0.5)
    hours = chance.uniform(20, 100)
    rate = (1 - begin) / hours
    shape = chance.choice(("linear", "steps", "teeth", "late"))
    step = chance.uniform(0.2, 1.0)  # hours
    late = chance.uniform(2, 10)
    tooth = chance.uniform(0.02, 0.1)
    period = chance.uniform(0.05, 0.2)
    of_shape: dict[str, Series] = {
        "linear": lambda hour: begin + rate * hour,
        "steps": lambda hour: begin + rate * step * math.floor(hour / step),
        "teeth": lambda hour: begin + rate * hour + tooth * (hour / period % 1),
        "late": lambda hour: begin + rate * max(0.0, hour - late),
    }
    return shape, of_shape[shape]


def healthy(chance: random.Random) -> tuple[str, Series]:
    """Return a series that stays below the limit."""
    begin = chance.uniform(0.1, 0.5)
    top = chance.uniform(begin + 0.05, 0.92)
    hours = chance.uniform(0.2, 12)
    period = chance.uniform(0.05, 3)
    wave = min(begin, top - begin) * chance.uniform(0.2, 0.9)
    jump = chance.uniform(0.5, 20)
    of_shape: dict[str, Series] = {
        "plateau": lambda hour: top * min(1.0, hour / 0.3),
        "saturating": lambda hour: begin + (top - begin) * (1 - math.exp(-hour / hours)),
        "teeth": lambda hour: begin + (top - begin) * (hour / period % 1),
        "jump": lambda hour: top if hour > jump else begin,
        "daily": lambda hour: begin + wave * (1 + math.sin(hour / 24 * 2 * math.pi)) / 2,
        "filled cache": lambda hour: min(begin + (top - begin) * min(1.0, hour / hours), 0.75),
    }
    shape = chance.choice(tuple(of_shape))
    return shape, of_shape[shape]


def samples(series: Series, chance: random.Random, hours: float) -> Iterator[tuple[float, float]]:
    """Yield the samples of a series with some noise, until memory is full or the hours are over."""
    warm_hours = 0.2
    at_s = 0.0
    while at_s < hours * HOUR_S:
        hour = at_s / HOUR_S
        part = series(hour) * min(1.0, hour / warm_hours + 0.1)
        if part >= 1:
            return
        yield at_s, (part + chance.gauss(0, 0.002)) * LIMIT
        at_s += SAMPLE_S


def announced(series: Series, chance: random.Random, hours: float) -> tuple[list, float]:
    """Return the lines of a series (time, forecast), and when it ended."""
    trend = Trend(LIMIT)
    lines = []
    passed = 0
    at_s = 0.0
    for at_s, used in samples(series, chance, hours):
        trend.add(at_s, used)
        if round(at_s / SAMPLE_S) % LOOK_SAMPLES:
            continue
        found = trend.forecast()
        if found is None:
            continue
        now = sum(found.full_in_s < step_s for step_s in STEPS_S)
        if now > passed:
            passed = now
            lines.append((at_s, found.full_in_s))
    return lines, at_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    right = 0
    false = 0
    for number in range(100):
        chance = random.Random(f"growing {seed} {number}")
        shape, series = growing(chance)
        lines, full_s = announced(series, chance, 200)
        first = lines[0] if lines else (full_s, 0.0)
        ahead_s = full_s - first[0]
        error = abs(first[1] - ahead_s) / ahead_s if ahead_s else 1.0
        is_right = ahead_s >= GOAL_AHEAD_S and error <= GOAL_ERROR
        right += is_right
        if not is_right:
            print(f"{shape}: {ahead_s / HOUR_S:.1f} h ahead, {error:.0%} off")
    for number in range(50):
        chance = random.Random(f"healthy {seed} {number}")
        shape, series = healthy(chance)
        lines, _ = announced(series, chance, 72)
        false += bool(lines)
        for at_s, left_s in lines:
            print(f"false alarm, {shape}: after {at_s / HOUR_S:.1f} h, {left_s / HOUR_S:.1f} h")
    conclude(
        f"{right} of 100 growing series announced >= 6 h ahead within 20 percent (goal >= "
        f"{GOAL_RATIO:.0%}), {false} false alarms in 50 healthy ones (goal 0)",
        met=right >= GOAL_RATIO * 100 and not false,
    )


if __name__ == "__main__":
    main()
