"""What pictures of incidents over time share: the scale of the bars' counts, and a lane for each cause."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

from oomguard.report.picture import Label, Line
from oomguard.report.time_axis import TimeAxis, step_of

T = TypeVar("T")


def by_cause(found: Iterable[tuple[T, str]], most_lanes: int) -> list[tuple[str, list[T]]]:
    """Return the causes, the most frequent first, each with what it stands beside; those beyond ``most_lanes`` together."""
    lanes: dict[str, list[T]] = {}
    for one, cause in found:
        lanes.setdefault(cause, []).append(one)
    ordered = sorted(lanes.items(), key=lambda item: (-len(item[1]), item[0]))
    if len(ordered) > most_lanes:
        rest = [one for _cause, others in ordered[most_lanes - 1 :] for one in others]
        ordered = [*ordered[: most_lanes - 1], ("other causes", rest)]
    return ordered


def top_of(most: int) -> int:
    """Return the count at the upper end of a scale on which ``most`` has room."""
    return math.ceil(most / step_of(most)) * step_of(most)


def scale(most: int, time: TimeAxis, *, above: float, tall: float, what: str) -> Iterator[Label | Line]:
    """Yield the lines of a scale up to ``top_of(most)`` with their counts; ``above`` is its upper end, ``tall`` its height, in pixels."""
    top = top_of(most)
    for count in range(0, top + 1, step_of(most)):
        y = above + tall * (1 - count / top)
        yield Line(((time.left, y), (time.left + time.plot, y)), "grid")
        yield Label(time.left - 8, y + 4, f"{count:,}", "dim", "end", 11)
    yield Label(time.left - 8, above - 12, f"{what} a {time.name}", "dim", "end", 11)
