"""A watch's timeline as a picture: calls as bands, below them a panel a device with its counters and its limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from oomguard.facts import format_gib
from oomguard.report.picture import Label, Line, Picture, Rect
from oomguard.report.picture_labels import SIZE, in_a_row, one_line, shortened
from oomguard.report.presentable import drawn
from oomguard.report.timeline_words import attempt_words, call_words, name
from oomguard.timeline import ALLOCATED, Counter, SeenCall, TimedAttempt, Timeline

Shape = Rect | Line | Label
WIDTH: Final = 960
_LEFT, _RIGHT = 92, 20
_PLOT: Final = WIDTH - _LEFT - _RIGHT
_ENDS: Final = (float(_LEFT), float(WIDTH - _RIGHT))
_LANE, _MOST_LANES = 22, 5
_PANEL, _GAP = 170, 44
_MOST_BANDS: Final = 400
_UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def timeline_picture(timeline: Timeline) -> Picture:
    """Return the picture; of a run in which nothing was sampled one that says so."""
    devices = list(dict.fromkeys(key.device for sample in timeline.samples for key in sample.bytes))
    if not devices:
        return _nothing(timeline)
    scale = _Scale(max(timeline.seconds, *(sample.seconds for sample in timeline.samples), 1e-9))
    lanes, left_out = _lanes(timeline.rows)
    shapes: list[Shape] = []
    y = 16.0
    for lane in lanes:
        shapes += [shape for row in lane for shape in _band(row, scale, y)]
        y += _LANE
    if left_out:
        shapes.append(Label(_LEFT, y + 12, f"{left_out} more calls are not drawn", "dim", size=11))
        y += 18
    panels = [y + 40 + (_PANEL + 40) * i for i in range(len(devices))]
    for device, at in zip(devices, panels, strict=True):
        shapes += _panel(timeline, device, scale, at)
    shapes += [*_failures(timeline.rows, scale, y, panels), *_marks(timeline, scale, panels)]
    y = panels[-1] + _PANEL
    shapes += _seconds(scale, y)
    height = math.ceil(y + _GAP)
    words = f"memory over {timeline.seconds:.1f} s of {', '.join(devices)}; {len(timeline.rows)} calls"
    return Picture(WIDTH, height, (Rect(0, 0, WIDTH, height, "back"), *shapes), words)


@dataclass(frozen=True, slots=True)
class _Scale:
    seconds: float

    def x(self, seconds: float) -> float:
        return _LEFT + _PLOT * min(1.0, max(0.0, seconds / self.seconds))


def _nothing(timeline: Timeline) -> Picture:
    lines = ["Nothing was seen: no counter was read.", *(drawn(note) for note in timeline.notes)]
    if not timeline.notes:
        lines.append("The watch was never entered, or this machine tells no memory of a device or of the process.")
    labels = [Label(_LEFT / 2, 40 + 22 * i, line, "dim" if i else "text", size=14) for i, line in enumerate(lines)]
    height = 60 + 22 * len(lines)
    return Picture(WIDTH, height, (Rect(0, 0, WIDTH, height, "back"), *labels), " ".join(lines))


def _lanes(rows: Iterable[SeenCall]) -> tuple[list[list[SeenCall]], int]:
    """Return the calls in lanes in which no two overlap, and how many found no place."""
    lanes: list[list[SeenCall]] = []
    left_out = 0
    for number, row in enumerate(sorted(rows, key=lambda row: row.began_s)):
        place = next((lane for lane in lanes if lane[-1].began_s + lane[-1].seconds <= row.began_s), None)
        if row.calls > 1 or number >= _MOST_BANDS or (place is None and len(lanes) >= _MOST_LANES):
            left_out += row.calls
        elif place is None:
            lanes.append([row])
        else:
            place.append(row)
    return lanes, left_out


def _band(row: SeenCall, scale: _Scale, y: float) -> list[Shape]:
    x, end = scale.x(row.began_s), scale.x(row.began_s + row.seconds)
    color = "bad call" if row.error else "call" if row.kind == "call" else "span"
    words = drawn(call_words(row))
    shapes: list[Shape] = [Rect(x, y, max(1.0, end - x - 1), _LANE - 4, color, words)]
    for timed in row.attempts:
        left, right = scale.x(timed.began_s), scale.x(timed.ended_s)
        ran = "allocated" if timed.attempt.succeeded else "failed"
        shapes.append(Rect(left, y + _LANE - 7, max(2.0, right - left - 1), 3, ran, drawn(attempt_words(timed))))
    if text := shortened(one_line(drawn(row.what)), end - x - 8):
        shapes.append(Label(x + 4, y + 12, text, size=SIZE))
    return shapes


def _panel(timeline: Timeline, device: str, scale: _Scale, y: float) -> list[Shape]:
    counters = list(dict.fromkeys(key for sample in timeline.samples for key in sample.bytes if key.device == device))
    limit = max((timeline.limits[key] for key in counters if key in timeline.limits), default=None)
    peaks = [use.peak_bytes or 0 for use in timeline.uses if use.device == device]
    most = max([limit or 0, *peaks, 1])
    step = _step(most)
    top = max(most * 1.06, step)

    def down(size: float) -> float:
        return y + _PANEL * (1 - min(size, top) / top)

    shapes: list[Shape] = []
    for i in range(int(top // step) + 1):
        at = down(i * step)
        shapes.append(Line(((_LEFT, at), (WIDTH - _RIGHT, at)), "grid"))
        shapes.append(Label(_LEFT - 8, at + 4, _round(i * step), "dim", "end", 11))
    for row in timeline.rows[:_MOST_BANDS]:
        shapes += _peak_of(row, device, scale, down)
    for key in counters:
        points = tuple((scale.x(s.seconds), down(s.bytes[key])) for s in timeline.samples if key in s.bytes)
        shapes.append(Line(points if len(points) > 1 else points * 2, key.what, 1.8))
    if limit is not None:
        shapes.append(Line(((_LEFT, down(limit)), (WIDTH - _RIGHT, down(limit))), "limit", 1.2, is_dashed=True))
    return [*shapes, *_legend(device, counters, limit, y - 10)]


def _legend(device: str, counters: list[Counter], limit: int | None, y: float) -> list[Shape]:
    shapes: list[Shape] = [Label(_LEFT, y, device, size=13)]
    x = _LEFT + 8.0 * len(device) + 16
    entries = [(key.what, key.what, False) for key in counters]
    if limit is not None:
        entries.append((f"limit {format_gib(limit)}", "limit", True))
    if any(key.what == ALLOCATED for key in counters):
        entries.append(("peak of a call", ALLOCATED, True))
    for text, color, is_dashed in entries:
        shapes.append(Line(((x, y - 4), (x + 24, y - 4)), color, 2, is_dashed=is_dashed))
        shapes.append(Label(x + 29, y, text, "dim", size=11))
        x += 29 + 6 * len(text) + 12
    return shapes


def _peak_of(row: SeenCall, device: str, scale: _Scale, down: Callable[[float], float]) -> list[Shape]:
    """Return the exact peak of a call, over its whole band: torch does not tell when in it that was."""
    use = next((use for use in row.uses if use.device == device and use.what == ALLOCATED), None)
    if use is None or use.peak_bytes is None or row.kind != "call":
        return []
    x, end, at = scale.x(row.began_s), scale.x(row.began_s + row.seconds), down(use.peak_bytes)
    return [Line(((x, at), (max(end, x + 2), at)), ALLOCATED, 1.2, is_dashed=True, title=drawn(call_words(row)))]


def _failed(rows: Iterable[SeenCall]) -> list[tuple[SeenCall, TimedAttempt]]:
    return [(row, timed) for row in rows for timed in row.attempts if not timed.attempt.succeeded]


def _failures(rows: Iterable[SeenCall], scale: _Scale, top: float, panels: list[float]) -> list[Shape]:
    shapes: list[Shape] = []
    told: list[tuple[float, str]] = []
    for row, timed in _failed(rows)[:_MOST_BANDS]:
        x, words = scale.x(timed.ended_s), drawn(f"{name(row)}: {attempt_words(timed)}")
        shapes += [Line(((x, y), (x, y + _PANEL)), "failed", 1, is_dashed=True, title=words) for y in panels]
        cross = (((x - 4, top), (x + 4, top + 8)), ((x - 4, top + 8), (x + 4, top)))
        shapes += [Line(points, "failed", 2, title=words) for points in cross]
        told.append((x, one_line(drawn(attempt_words(timed)))))
    return [*shapes, *in_a_row(told, top + 8, "failed", gap=8, ends=_ENDS)]


def _marks(timeline: Timeline, scale: _Scale, panels: list[float]) -> list[Shape]:
    told = [(scale.x(mark.seconds), one_line(drawn(mark.label))) for mark in timeline.marks[:_MOST_BANDS]]
    lines = [Line(((x, y), (x, y + _PANEL)), "mark", 1, title=text) for x, text in told for y in panels]
    return [*lines, *in_a_row(told, panels[-1] + _PANEL - 6, "mark", gap=4, ends=_ENDS)]


def _seconds(scale: _Scale, y: float) -> list[Shape]:
    magnitude = 10 ** math.floor(math.log10(scale.seconds / 5))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if scale.seconds / (magnitude * factor) <= 8)
    shapes: list[Shape] = []
    for i in range(int(scale.seconds / step + 1e-9) + 1):
        x = scale.x(i * step)
        shapes.append(Line(((x, y), (x, y + 4)), "dim"))
        shapes.append(Label(x, y + 18, f"{i * step:g} s", "dim", "middle", 11))
    return shapes


def _round(size_bytes: int) -> str:
    """Return a size of the axis, which is a power of two or a few of them: no digit is lost."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size_bytes >= unit), (1, "bytes"))
    return f"{size_bytes / unit:g} {name}" if size_bytes else "0"


def _step(most: int) -> int:
    """Return a distance of lines, a round number of bytes in powers of two, with at most five lines up to ``most``."""
    return int(2 ** math.ceil(math.log2(max(1.0, most / 5))))
