"""Incidents over time as a picture: runs and failures in spans of time, below them a lane for each cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from oomguard.past_runs import FAILED, NOT_ENDED, RAN, REPAIRED, STOPPED, PastRun
from oomguard.report.counts_over_time import by_cause, scale, top_of
from oomguard.report.history import failure_words, moment, shown_command
from oomguard.report.picture import Label, Line, Picture, Rect
from oomguard.report.presentable import drawn
from oomguard.report.time_axis import TimeAxis

Shape = Rect | Line | Label
WIDTH: Final = 960
_LEFT, _RIGHT, _TOP = 250, 24, 60
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_PANEL, _LANE, _GAP = 150, 26, 30
_MOST_LANES: Final = 10
_MARK: Final = 3  # pixels; the runs of as many are one mark
_NAME_CHARS: Final = 36
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


def history_picture(runs: Sequence[PastRun]) -> Picture:
    """Return the picture of at least one run."""
    time = TimeAxis.of([run.began_at for run in runs], width=WIDTH, left=_LEFT, right=_RIGHT)
    lanes = by_cause(_causes(runs), _MOST_LANES)
    height = _TOP + _PANEL + _GAP + _LANE * len(lanes) + 54
    shapes: list[Shape] = [*_legend(), *_bars(runs, time), *_lane_shapes(lanes, time), *time.shapes(height - 40)]
    counts = Counter(run.result for run in runs)
    words = f"{len(runs)} runs from {moment(time.begin_s)}, by {time.name}: {counts[FAILED]} failed, {counts[REPAIRED]} repaired"
    return Picture(WIDTH, height, (Rect(0, 0, WIDTH, height, "back"), *shapes), words)


def _legend() -> Iterator[Shape]:
    x = float(_RIGHT)
    for words, color in _COLORS.items():
        yield Rect(x, 14, 12, 12, color)
        yield Label(x + 18, 24, words, "dim")
        x += 18 + 7 * len(words) + 22


def _bars(runs: Sequence[PastRun], time: TimeAxis) -> Iterator[Shape]:
    spans: list[Counter[str]] = [Counter() for _ in range(time.count)]
    for run in runs:
        spans[time.span(run.began_at)][_became(run)] += 1
    most = max(sum(span.values()) for span in spans)
    top = top_of(most)
    yield from scale(most, time, above=_TOP, tall=_PANEL, what="runs")
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


def _causes(runs: Sequence[PastRun]) -> Iterator[tuple[PastRun, str]]:
    """Yield each run with each of its causes."""
    for run in runs:
        for cause in dict.fromkeys(i.causes[0].id if i.causes else "unknown" for i in run.incidents):
            yield run, cause


def _lane_shapes(lanes: Sequence[tuple[str, Sequence[PastRun]]], time: TimeAxis) -> Iterator[Shape]:
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
