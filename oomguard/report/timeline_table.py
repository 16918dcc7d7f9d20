"""What a watch saw as tables: memory by counter, then the calls."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.report.presentable import drawn
from oomguard.report.timeline_words import attempts, peak, size, tokens
from oomguard.timeline import MemoryUse, SeenCall, Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_ROWS: Final = 20
_MEMORY: Final = ("memory", "before", "peak", "after", "limit")
_CALLS: Final = ("call", "rows", "tokens", "time", "before", "peak", "after", "attempts")


def tables(timeline: Timeline, *, most_rows: int = MOST_ROWS) -> RenderableType:
    """Return the tables of rich; texts are masked and fit for a screen."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    if timeline.uses:
        parts.append(_table(memory_rows(timeline.uses)))
    shown, left_out = call_rows(timeline.rows, most_rows)
    if len(shown) > 1:
        parts.append(_table(shown))
    parts += [Text(line, style="dim") for line in _below(timeline, left_out)]
    return Group(*parts)


def table_text(timeline: Timeline) -> str:
    """Return the tables as plain text, as wide as the terminal."""
    from rich.console import Console

    columns = shutil.get_terminal_size().columns
    console = Console(file=io.StringIO(), width=columns, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(tables(timeline))
    lines = [line.rstrip() for line in captured.get().splitlines()]
    # The table has an empty line on each side: one between two is enough.
    return "\n".join(line for i, line in enumerate(lines) if line or (0 < i < len(lines) - 1 and lines[i - 1]))


def memory_rows(uses: Sequence[MemoryUse]) -> list[tuple[str, ...]]:
    """Return a row for each counter, headings first."""
    rows = [
        (f"{use.device} {use.what}", size(use.before_bytes), peak(use), size(use.after_bytes), size(use.limit_bytes))
        for use in uses
    ]
    return [_MEMORY, *rows]


def call_rows(rows: Sequence[SeenCall], most_rows: int) -> tuple[list[tuple[str, ...]], int]:
    """Return a row for each call, headings first, and how many calls are left out: of many the largest and the failed are shown."""
    shown = list(rows)
    if len(rows) > most_rows:
        first = sorted(range(len(rows)), key=lambda i: (not _failed(rows[i]), -_peak_bytes(rows[i]), i))[:most_rows]
        shown = [rows[i] for i in sorted(first)]
    left_out = sum(row.calls for row in rows) - sum(row.calls for row in shown)
    several = len({row.model for row in rows if row.model}) > 1
    texts = [_row(row, _of_model(row) if several else row.what) for row in drawn(tuple(shown))]
    return [_CALLS, *texts], left_out


def _below(timeline: Timeline, left_out: int) -> list[str]:
    lines = []
    if left_out:
        lines.append(f"{left_out} more calls: in .rows and the CSV")
    if any(use.sampled for use in timeline.uses):
        lines.append(f"~ the largest of samples, one every {timeline.sample_every_s:g} s; the other peaks are exact")
    if timeline.error:
        lines.append(f"ended with {drawn(timeline.error)}")
    if not timeline.samples:
        lines += timeline.notes or ("nothing was seen: the watch was not entered",)
    return lines


def _row(row: SeenCall, what: str) -> tuple[str, ...]:
    use = row.use
    what = what if row.calls == 1 else f"{what}, {row.calls:,} calls"
    memory = ("", "", "") if use is None else (size(use.before_bytes), peak(use), size(use.after_bytes))
    told = ", ".join(text for text in (attempts(row), row.error) if text)
    return (what, "" if row.rows is None else f"{row.rows:,}", tokens(row), f"{row.seconds:.1f} s", *memory, told)


def _of_model(row: SeenCall) -> str:
    """Return a call with its model, which a narrow terminal breaks off and cuts; the call stays whole."""
    return f"{row.what} ({row.model})" if row.model else row.what


def _failed(row: SeenCall) -> bool:
    return bool(row.error) or any(not timed.attempt.succeeded for timed in row.attempts)


def _peak_bytes(row: SeenCall) -> int:
    return 0 if row.use is None else row.use.peak_bytes or 0


def _table(rows: Sequence[Sequence[str]]) -> RenderableType:
    """Return a table; columns in which every cell is empty are left out."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in kept:
        is_text = rows[0][i] in {"memory", "call", "attempts"}
        table.add_column(rows[0][i], justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows[1:]:
        table.add_row(*(Text(row[i]) for i in kept))
    return table
