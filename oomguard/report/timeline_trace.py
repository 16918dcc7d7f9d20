"""What a watch saw as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from oomguard.report.json import json_line
from oomguard.report.presentable import drawn
from oomguard.report.timeline_words import attempt_words, name
from oomguard.timeline import SeenCall, Timeline

_PROCESS = {"pid": 1}


class _Slice(NamedTuple):
    """One interval of a track, in seconds."""

    began: float
    ended: float
    name: str
    category: str
    args: dict[str, Any]


def trace_json(timeline: Timeline) -> str:
    """Return calls, spans and attempts as slices, counters as counter tracks, and marks as instants.

    Calls that were added up have no moment and are left out.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": "oomguard.watch"}, **_PROCESS},
        *_slice_events(sorted(_slices(timeline), key=lambda one: (one.began, -one.ended))),
        *(
            {"ph": "C", "name": " ".join(key), "ts": _us(sample.seconds), "args": {"bytes": size}, **_PROCESS}
            for sample in timeline.samples
            for key, size in sample.bytes.items()
        ),
        *(
            {"ph": "i", "s": "g", "name": drawn(mark.label), "ts": _us(mark.seconds), "tid": 1, **_PROCESS}
            for mark in timeline.marks
        ),
    ]
    return json_line({"traceEvents": events, "displayTimeUnit": "ms"})


def _slices(timeline: Timeline) -> Iterator[_Slice]:
    for row in timeline.rows:
        if row.calls > 1:
            continue
        ended = row.began_s + row.seconds
        yield _Slice(row.began_s, ended, name(row), row.kind, _args(row))
        for timed in row.attempts:
            error = {"error": timed.attempt.error} if timed.attempt.error else {}
            yield _Slice(timed.began_s, min(timed.ended_s, ended), attempt_words(timed), "attempt", error)


def _args(row: SeenCall) -> dict[str, Any]:
    numbers = {"rows": row.rows, "prompt_tokens": row.prompt_tokens, "max_new_tokens": row.max_new_tokens}
    peaks = {f"{use.device} {use.what}, peak_bytes": use.peak_bytes for use in row.uses}
    return {key: value for key, value in (numbers | peaks | {"error": row.error or None}).items() if value is not None}


def _slice_events(slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Yield the slices, which begin in this order, on as many tracks as it takes for all of one track to nest."""
    tracks: list[list[float]] = []  # the ends of the slices that are open
    for one in slices:
        for open_ends in tracks:
            while open_ends and open_ends[-1] <= one.began:
                open_ends.pop()
        fits = (number for number, ends in enumerate(tracks) if not ends or one.ended <= ends[-1])
        track = next(fits, len(tracks))
        if track == len(tracks):
            tracks.append([])
        tracks[track].append(one.ended)
        yield {
            "ph": "X",
            "name": drawn(one.name),
            "cat": one.category,
            "ts": _us(one.began),
            "dur": _us(one.ended - one.began),
            "tid": track + 1,
            "args": drawn(one.args),
            **_PROCESS,
        }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
