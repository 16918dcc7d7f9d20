"""What a watch saw as CSV: sizes in bytes, an unknown one empty."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from oomguard.report.presentable import drawn
from oomguard.report.timeline_words import attempts
from oomguard.timeline import MemoryUse, SeenCall, Timeline

_OF_CALL: Final = ("kind", "what", "model", "began_s", "seconds", "rows", "prompt_tokens", "max_new_tokens", "calls")
_OF_USE: Final = ("device", "counter", "before_bytes", "peak_bytes", "after_bytes", "limit_bytes", "peak_is_sampled")
ROWS: Final = (*_OF_CALL, *_OF_USE, "attempts", "error")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
SAMPLES: Final = ("seconds", "device", "counter", "bytes")


def rows_csv(timeline: Timeline) -> str:
    """Return a line for each counter of the whole watch, of each call and span, and a line for each mark."""
    whole = SeenCall("", "watch", 0.0, timeline.seconds, uses=timeline.uses, error=timeline.error)
    lines = [line for row in (whole, *timeline.rows) for line in _lines(row)]
    lines += [("mark", mark.label, "", _seconds(mark.seconds), *[""] * (len(ROWS) - 4)) for mark in timeline.marks]
    return _text(ROWS, lines)


def samples_csv(timeline: Timeline) -> str:
    """Return a line for each sample and counter."""
    return _text(
        SAMPLES,
        (
            (_seconds(sample.seconds), key.device, key.what, size)
            for sample in timeline.samples
            for key, size in sample.bytes.items()
        ),
    )


def _lines(row: SeenCall) -> Iterator[tuple[Any, ...]]:
    call = (
        row.kind,
        row.what,
        row.model,
        _seconds(row.began_s),
        _seconds(row.seconds),
        row.rows,
        row.prompt_tokens,
        row.max_new_tokens,
        row.calls,
    )
    for use in row.uses or (None,):
        yield (*call, *_of(use), attempts(row), row.error)


def _of(use: MemoryUse | None) -> tuple[Any, ...]:
    if use is None:
        return ("",) * len(_OF_USE)
    sizes = (use.before_bytes, use.peak_bytes, use.after_bytes, use.limit_bytes)
    return (use.device, use.what, *sizes, "yes" if use.sampled else "no")


def _seconds(seconds: float) -> str:
    return f"{seconds:.6f}"


def _text(head: Sequence[str], lines: Iterable[tuple[Any, ...]]) -> str:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_cell(value) for value in drawn(line)] for line in lines)
    return file.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell as text where a spreadsheet would take a label for a formula: after an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
