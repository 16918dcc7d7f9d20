"""The axis of time below a picture: moments in spans as clocks and calendars have them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.report.picture import Label, Line

_MOST_SPANS: Final = 48
_FEWEST_SPANS: Final = 12
# A span of time is one of these, as clocks and calendars have them; the smallest that gives at most _MOST_SPANS.
_SPANS_S: Final = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 28 * 86400, 364 * 86400)
_NAMES: Final = ("minute", "10 minutes", "hour", "6 hours", "day", "week", "4 weeks", "year")


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Where a moment lies: from ``begin_s`` (Unix seconds), in ``count`` spans of ``span_s`` seconds; ``left`` and ``plot`` are pixels."""

    begin_s: float
    span_s: int
    count: int
    name: str
    left: float
    plot: float

    @classmethod
    def of(cls, moments: Sequence[float], *, width: float, left: float, right: float) -> TimeAxis:
        """Return the axis of at least one moment (Unix seconds), between ``left`` and ``right`` pixels of a picture's edges."""
        first, last = min(moments), max(moments)
        length = last - first
        i = next((i for i, span in enumerate(_SPANS_S) if length / span <= _MOST_SPANS - 1), len(_SPANS_S) - 1)
        span = _SPANS_S[i]
        offset = datetime.datetime.fromtimestamp(first).astimezone().utcoffset() or datetime.timedelta()
        shift = offset.total_seconds()  # days begin at midnight here
        begin = math.floor((first + shift) / span) * span - shift
        count = math.floor((last - begin) / span) + 1
        # Of a few moments the spans before them stand there too: bars as narrow as of many, and marks below their own.
        before = max(0, _FEWEST_SPANS - count)
        return cls(begin - before * span, span, before + count, _NAMES[i], left, width - left - right)

    def x(self, unix_s: float) -> float:
        """Return where a moment lies, in pixels."""
        return self.left + self.plot * (unix_s - self.begin_s) / (self.span_s * self.count)

    def span(self, unix_s: float) -> int:
        """Return the number of the span in which a moment lies, the first is 0."""
        return min(self.count - 1, max(0, math.floor((unix_s - self.begin_s) / self.span_s)))

    def shapes(self, y: float) -> Iterator[Label | Line]:
        """Yield the axis at ``y`` pixels: a line, with the moments at some of its spans."""
        every = max(1, math.ceil(self.count / 6))
        form = "%H:%M" if self.span_s < 86400 and self.span_s * self.count <= 86400 else "%Y-%m-%d"
        form = "%m-%d %H:%M" if form != "%H:%M" and self.span_s < 86400 else form
        yield Line(((self.left, y), (self.left + self.plot, y)), "dim")
        for i in range(0, self.count + 1, every):
            at = self.begin_s + i * self.span_s
            yield Line(((self.x(at), y), (self.x(at), y + 4)), "dim")
            text = datetime.datetime.fromtimestamp(at).astimezone().strftime(form)
            yield Label(self.x(at), y + 18, text, "dim", "middle" if i < self.count else "end", 11)


def step_of(most: int) -> int:
    """Return a distance of lines, 1, 2 or 5 times a power of ten, with at most five lines up to ``most``."""
    power = int(10 ** max(0, math.floor(math.log10(max(1, most / 5)))))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 5)
