"""Incidents of many logs over time as a picture: how many in each span, below them a lane for each cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from oomguard.fleet.groups import FleetSummary
from oomguard.report.counts_over_time import by_cause, scale, top_of
from oomguard.report.history import moment
from oomguard.report.picture import Label, Line, Picture, Rect
from oomguard.report.time_axis import TimeAxis

Shape = Rect | Line | Label
WIDTH: Final = 960
_LEFT, _RIGHT, _TOP = 280, 24, 40
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_PANEL, _LANE, _GAP = 150, 26, 30
_MOST_LANES: Final = 12


def fleet_picture(summary: FleetSummary) -> Picture:
    """Return the picture of at least one incident whose time is known."""
    time = TimeAxis.of([at for at, _cause in summary.moments], width=WIDTH, left=_LEFT, right=_RIGHT)
    lanes = by_cause(summary.moments, _MOST_LANES)
    height = _TOP + _PANEL + _GAP + _LANE * len(lanes) + 54
    shapes: list[Shape] = [*_bars(summary, time), *_lane_shapes(lanes, time), *time.shapes(height - 40)]
    words = f"{len(summary.moments):,} incidents from {moment(time.begin_s)}, by {time.name}, in {len(lanes)} causes"
    return Picture(WIDTH, height, (Rect(0, 0, WIDTH, height, "back"), *shapes), words)


def _bars(summary: FleetSummary, time: TimeAxis) -> Iterator[Shape]:
    counts = Counter(time.span(at) for at, _cause in summary.moments)
    most = max(counts.values())
    top = top_of(most)
    yield from scale(most, time, above=_TOP, tall=_PANEL, what="incidents")
    width = _PLOT / time.count
    for i, count in sorted(counts.items()):
        tall = _PANEL * count / top
        words = f"{moment(time.begin_s + i * time.span_s)}, {time.name}: {count:,}"
        yield Rect(_LEFT + i * width + 1, _TOP + _PANEL - tall, max(1.5, min(width, 60) - 2), tall, "failed", words)


def _lane_shapes(lanes: Sequence[tuple[str, Sequence[float]]], time: TimeAxis) -> Iterator[Shape]:
    """Yield a lane a cause: in each span a block as tall as its share of the lane's fullest span."""
    width = _PLOT / time.count
    for i, (cause, moments) in enumerate(lanes):
        y = _TOP + _PANEL + _GAP + i * _LANE
        yield Line(((_LEFT, y + _LANE - 4), (WIDTH - _RIGHT, y + _LANE - 4)), "grid")
        yield Label(_LEFT - 8, y + _LANE / 2 + 4, f"{cause}  {len(moments):,}", "text", "end", 11)
        counts = Counter(map(time.span, moments))
        most = max(counts.values())
        for span, count in sorted(counts.items()):
            tall = max(2.0, (_LANE - 8) * count / most)
            words = f"{cause}, {moment(time.begin_s + span * time.span_s)}, {time.name}: {count:,}"
            yield Rect(
                _LEFT + span * width + 1, y + _LANE - 4 - tall, max(1.5, min(width, 60) - 2), tall, "repaired", words
            )
