"""Incidents over time as a picture: runs and failures in spans of time, below them a lane for each cause."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.past_runs import FAILED, NOT_ENDED, RAN, REPAIRED, STOPPED, PastRun
from oomguard.report.history import failure_words, moment, shown_command
from oomguard.report.picture import Label, Line, Picture, Rect
from oomguard.report.presentable import drawn

Shape = Rect | Line | Label
WIDTH: Final = 960
_LEFT, _RIGHT, _TOP = 250, 24, 60
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_PANEL, _LANE, _GAP = 150, 26, 30
_MOST_SPANS: Final = 48
_FEWEST_SPANS: Final = 12
_MOST_LANES: Final = 10
_MARK: Final = 3  # pixels; the runs of as many are one mark
_NAME_CHARS: Final = 36
# A span of time is one of these, as clocks and calendars have them; the smallest that gives at most _MOST_SPANS.
_SPANS_S: Final = (60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 28 * 86400, 364 * 86400)
_NAMES: Final = ("minute", "10 minutes", "hour", "6 hours", "day", "week", "4 weeks", "year")
# What became of a run, with its colour, from below.
_ENDED: Final = "an incident ended it"
_RECOVERED: Final = "it failed, then it ran"
_OTHERWISE: Final = "failed of something else"
_COLORS: Final = {
    _ENDED: "failed",
    _RECOVERED: "repaired",
    _OTHERWISE: "bad call",
    RAN: "other runs",
    STOPPED: "span",
    NOT_ENDED: "dim",
}


@dataclass(frozen=True, slots=True)
class _Time:
    """Where a moment lies: from ``begin_s``, in spans of ``span_s`` seconds, ``count`` of them."""

    begin_s: float
    span_s: int
    count: int
    name: str

    @classmethod
    def of(cls, runs: Sequence[PastRun]) -> _Time:
        first, last = min(run.began_at for run in runs), max(run.began_at for run in runs)
        length = last - first
        i = next((i for i, span in enumerate(_SPANS_S) if length / span <= _MOST_SPANS - 1), len(_SPANS_S) - 1)
        span = _SPANS_S[i]
        offset = datetime.datetime.fromtimestamp(first).astimezone().utcoffset() or datetime.timedelta()
        shift = offset.total_seconds()  # days begin at midnight here
        begin = math.floor((first + shift) / span) * span - shift
        count = math.floor((last - begin) / span) + 1
        # Of a few runs the spans before them stand there too: bars as narrow as of many, and marks below their own.
        before = max(0, _FEWEST_SPANS - count)
        return cls(begin - before * span, span, before + count, _NAMES[i])

    def x(self, unix_s: float) -> float:
        return _LEFT + _PLOT * (unix_s - self.begin_s) / (self.span_s * self.count)

    def span(self, unix_s: float) -> int:
        return min(self.count - 1, max(0, math.floor((unix_s - self.begin_s) / self.span_s)))


def history_picture(runs: Sequence[PastRun]) -> Picture:
    """Return the picture of at least one run."""
    time = _Time.of(runs)
    lanes = _lanes(runs)
    height = _TOP + _PANEL + _GAP + _LANE * len(lanes) + 54
    shapes: list[Shape] = [*_legend(), *_bars(runs, time), *_lane_shapes(lanes, time), *_axis(time, height - 40)]
    counts = Counter(run.result for run in runs)
    words = f"{len(runs)} runs from {moment(time.begin_s)}, by {time.name}: {counts[FAILED]} failed, {counts[REPAIRED]} repaired"
    return Picture(WIDTH, height, (Rect(0, 0, WIDTH, height, "back"), *shapes), words)


def _legend() -> Iterator[Shape]:
    x = float(_RIGHT)
    for words, color in _COLORS.items():
        yield Rect(x, 14, 12, 12, color)
        yield Label(x + 18, 24, words, "dim")
        x += 18 + 7 * len(words) + 22


def _bars(runs: Sequence[PastRun], time: _Time) -> Iterator[Shape]:
    spans: list[Counter[str]] = [Counter() for _ in range(time.count)]
    for run in runs:
        spans[time.span(run.began_at)][_became(run)] += 1
    most = max(sum(span.values()) for span in spans)
    step = _step(most)
    top = math.ceil(most / step) * step
    for count in range(0, top + 1, step):
        y = _TOP + _PANEL * (1 - count / top)
        yield Line(((_LEFT, y), (WIDTH - _RIGHT, y)), "grid")
        yield Label(_LEFT - 8, y + 4, f"{count:,}", "dim", "end", 11)
    yield Label(_LEFT - 8, _TOP - 12, f"runs a {time.name}", "dim", "end", 11)
    width = _PLOT / time.count
    for i, span in enumerate(spans):
        words = f"{moment(time.begin_s + i * time.span_s)}, {time.name}: " + ", ".join(
            f"{n:,} {w}" for w, n in span.items()
        )
        below = 0
        for what, color in _COLORS.items():
            if count := span[what]:
                tall = _PANEL * count / top
                y = _TOP + _PANEL * (1 - below / top) - tall
                yield Rect(_LEFT + i * width + 1, y, max(1.5, min(width, 60) - 2), tall, color, words)
                below += count


def _became(run: PastRun) -> str:
    if run.result == FAILED:
        return _ENDED if run.attempts[-1].attempt.incident is not None else _OTHERWISE
    return _RECOVERED if run.result == REPAIRED else run.result


def _lanes(runs: Sequence[PastRun]) -> list[tuple[str, list[PastRun]]]:
    """Return the causes, the most frequent first, each with its runs; the rest of them together."""
    by_cause: dict[str, list[PastRun]] = {}
    for run in runs:
        for cause in dict.fromkeys(i.causes[0].id if i.causes else "unknown" for i in run.incidents):
            by_cause.setdefault(cause, []).append(run)
    ordered = sorted(by_cause.items(), key=lambda item: (-len(item[1]), item[0]))
    if len(ordered) > _MOST_LANES:
        rest = [run for _cause, found in ordered[_MOST_LANES - 1 :] for run in found]
        ordered = [*ordered[: _MOST_LANES - 1], ("other causes", rest)]
    return ordered


def _lane_shapes(lanes: Sequence[tuple[str, Sequence[PastRun]]], time: _Time) -> Iterator[Shape]:
    for i, (cause, runs) in enumerate(lanes):
        y = _TOP + _PANEL + _GAP + i * _LANE
        name = cause if len(cause) <= _NAME_CHARS else f"{cause[: _NAME_CHARS - 1]}…"
        yield Line(((_LEFT, y + _LANE / 2), (WIDTH - _RIGHT, y + _LANE / 2)), "grid")
        yield Label(_LEFT - 8, y + _LANE / 2 + 4, f"{drawn(name)}  {len(runs):,}", "text", "end", 11)
        marks: dict[int, list[PastRun]] = {}
        for run in runs:
            marks.setdefault(round(time.x(run.began_at) / _MARK), []).append(run)
        for at, same in sorted(marks.items()):
            color = "repaired" if all(run.result == REPAIRED for run in same) else "failed"
            yield Rect(_MARK * (at - 0.5), y + 4, _MARK, _LANE - 8, color, _mark_words(same))


def _mark_words(runs: Sequence[PastRun]) -> str:
    first = runs[-1]
    words = f"run {first.number}, {moment(first.began_at)}: {failure_words(first.incidents[0])}, {first.result}"
    more = f"\nand {len(runs) - 1:,} more" if len(runs) > 1 else ""
    return f"{drawn(words)}\n{shown_command(first)}{more}"


def _axis(time: _Time, y: float) -> Iterator[Shape]:
    every = max(1, math.ceil(time.count / 6))
    form = "%H:%M" if time.span_s < 86400 and time.span_s * time.count <= 86400 else "%Y-%m-%d"
    form = "%m-%d %H:%M" if form != "%H:%M" and time.span_s < 86400 else form
    yield Line(((_LEFT, y), (WIDTH - _RIGHT, y)), "dim")
    for i in range(0, time.count + 1, every):
        at = time.begin_s + i * time.span_s
        yield Line(((time.x(at), y), (time.x(at), y + 4)), "dim")
        text = datetime.datetime.fromtimestamp(at).astimezone().strftime(form)
        yield Label(time.x(at), y + 18, text, "dim", "middle" if i < time.count else "end", 11)


def _step(most: int) -> int:
    """Return a distance of lines, 1, 2 or 5 times a power of ten, with at most five lines up to ``most``."""
    power = int(10 ** max(0, math.floor(math.log10(max(1, most / 5)))))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 5)
