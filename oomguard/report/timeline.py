"""Show a watch's timeline: tables, CSV, a plot, and a Chrome trace."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oomguard.core.errors import UsageError
from oomguard.core.facts import GIB, MIB, format_gib
from oomguard.core.installation import install_hint
from oomguard.core.measurements import (
    MemoryUse,
    SeenCall,
    TimedAttempt,
    Timeline,
)
from oomguard.core.presentable import drawn
from oomguard.core.records import ALLOCATED, Counter
from oomguard.report.json import json_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType


UNKNOWN = "-"


def size(size_bytes: int | None) -> str:
    """Format a size; a dash if it is unknown."""
    if size_bytes is None:
        return UNKNOWN
    if size_bytes:
        return format_gib(size_bytes)
    return "0"


def peak(use: MemoryUse) -> str:
    """Format a peak, with ``~`` if it is only the largest sample."""
    if use.sampled and use.peak_bytes is not None:
        return f"~{size(use.peak_bytes)}"
    return size(use.peak_bytes)


def name(row: SeenCall) -> str:
    """Return the name of a call, with its model."""
    if row.model:
        return f"{row.model}.{row.what}"
    return row.what


def tokens(row: SeenCall) -> str:
    """Return the tokens of each row: the prompt's, and the number to generate."""
    if row.prompt_tokens is None:
        return ""
    if row.max_new_tokens is None:
        return f"{row.prompt_tokens:,}"
    return f"{row.prompt_tokens:,} + {row.max_new_tokens:,}"


def attempt_words(timed: TimedAttempt) -> str:
    """Return an attempt's settings and result."""
    attempt = timed.attempt
    settings = ", ".join(f"{key} {value}" for key, value in attempt.settings.items())
    return f"{settings} {'ran' if attempt.succeeded else 'failed'}".strip()


def attempts(row: SeenCall) -> str:
    """Return a call's attempts in one line; "" if the call ran unchanged.

    If only the batch size changed, the line shows the sizes.
    """
    if row.attempts:
        first = row.attempts[0].attempt
    else:
        first = None
    if (
        first is not None
        and len(row.attempts) == 1
        and first.succeeded
        and first.settings == {"batch_size": row.rows}
    ):
        return ""
    if all(set(timed.attempt.settings) == {"batch_size"} for timed in row.attempts):
        sizes = " -> ".join(str(timed.attempt.settings["batch_size"]) for timed in row.attempts)
        if not row.attempts or row.attempts[-1].attempt.succeeded:
            return sizes
        return f"{sizes} failed"
    return ", ".join(map(attempt_words, row.attempts))


# CSV: sizes are in bytes, and an unknown size is empty.

# One flat table for spreadsheets: first the call, then one counter of it.
_OF_CALL: Final = (
    "kind",
    "what",
    "model",
    "began_s",
    "seconds",
    "rows",
    "prompt_tokens",
    "max_new_tokens",
    "calls",
)
_OF_USE: Final = (
    "device",
    "counter",
    "before_bytes",
    "peak_bytes",
    "after_bytes",
    "limit_bytes",
    "peak_is_sampled",
)
ROWS: Final = (*_OF_CALL, *_OF_USE, "attempts", "error")
# A spreadsheet runs a cell that begins with one of these as a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
SAMPLES: Final = ("seconds", "device", "counter", "bytes")


def rows_csv(timeline: Timeline) -> str:
    """Return one line for each counter of the watch, each call, each span, and each mark."""
    whole = SeenCall("", "watch", 0.0, timeline.seconds, uses=timeline.uses, error=timeline.error)
    lines = list(_lines(whole))
    for row in timeline.rows:
        lines += _lines(row)
    for mark in timeline.marks:
        lines.append(("mark", mark.label, "", _seconds(mark.seconds), *[""] * (len(ROWS) - 4)))
    return _text(ROWS, lines)


def samples_csv(timeline: Timeline) -> str:
    """Return one line for each sample and counter."""
    rows = []
    for sample in timeline.samples:
        for key, size in sample.bytes.items():
            rows.append((_seconds(sample.seconds), key.device, key.what, size))
    return _text(SAMPLES, rows)


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
    # A call without measured memory still has its row.
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
    # The csv module writes its own line ends.
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for line in lines:
        writer.writerow(map(_cell, drawn(line)))
    return file.getvalue()


def _cell(value: Any) -> Any:
    """Return a cell as text: a label like a formula is prefixed with an apostrophe."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value


# The plot has a panel for each device, with counters, limit, calls, failures and marks.

# With more events, a plot is only a block of color.
_MOST_ROWS: Final = 400
# A longer label would leave the panel.
_LABEL_CHARS: Final = 40


def figure(timeline: Timeline) -> Figure:
    """Return the plot.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = (
            f'{install_hint("plots")}; or, without it, seen.to_trace("watch.trace.json") for '
            "ui.perfetto.dev"
        )
        raise UsageError("the plot needs matplotlib, which is not installed", hint=hint) from None
    devices = dict.fromkeys(key.device for key in _counters(timeline))
    if not devices:
        empty = Figure(figsize=(9.6, 2))
        words = "\n".join(["The watch read no counter.", *drawn(timeline.notes)])
        empty.text(0.05, 0.5, words, va="center", parse_math=False)
        return empty
    made = Figure(figsize=(9.6, 1 + 2.6 * len(devices)), layout="constrained")
    panels = made.subplots(len(devices), sharex=True, squeeze=False)[:, 0]
    for axes, device in zip(panels, devices, strict=True):
        _draw_counters(axes, timeline, device)
        _draw_events(axes, timeline)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    panels[-1].set_xlabel("seconds")
    return made


def png(timeline: Timeline) -> bytes:
    """Return the plot as PNG."""
    file = io.BytesIO()
    figure(timeline).savefig(file, format="png", dpi=120)
    return file.getvalue()


def _counters(timeline: Timeline) -> Iterable[Counter]:
    """Return each counter that some sample has, in the order of their first samples."""
    counters: dict[Counter, None] = {}
    for sample in timeline.samples:
        counters |= dict.fromkeys(sample.bytes)
    return counters


def _draw_counters(axes: Axes, timeline: Timeline, device: str) -> None:
    """Draw each counter of a device, the limit, and the exact peak of each call.

    torch does not report when in the call the peak was, so the peak is a horizontal line.
    """
    keys = []
    limit = 0
    for key in _counters(timeline):
        if key.device == device:
            keys.append(key)
            limit = max(limit, timeline.limits.get(key, 0))
    largest = limit
    for use in timeline.uses:
        if use.device == device:
            largest = max(largest, use.peak_bytes or 0)
    if largest >= GIB:
        unit = GIB
        unit_name = "GiB"
    else:
        unit = MIB
        unit_name = "MiB"
    for key in keys:
        points = []
        for sample in timeline.samples:
            if key in sample.bytes:
                points.append((sample.seconds, sample.bytes[key] / unit))
        seconds, sizes = zip(*points, strict=True)
        # A line through a single point would be invisible.
        axes.plot(seconds, sizes, marker="." if len(points) == 1 else "", label=key.what)
    if limit:
        axes.axhline(
            limit / unit, color="tab:red", linestyle="--", label=f"limit {format_gib(limit)}"
        )
    peak_label = "peak of a call"
    for row in timeline.rows[:_MOST_ROWS]:
        peak = None
        for use in row.uses:
            if (use.device, use.what) == (device, ALLOCATED):
                peak = use.peak_bytes
                break
        if row.kind == "call" and row.calls == 1 and peak is not None:
            ends = row.began_s, row.began_s + row.seconds
            axes.hlines(peak / unit, *ends, color="tab:blue", linestyle=":", label=peak_label)
            peak_label = ""
    axes.set_title(device, loc="left")
    axes.set_ylabel(unit_name)
    # A cut axis would make small growth look like a leak.
    axes.set_ylim(bottom=0)


def _draw_events(axes: Axes, timeline: Timeline) -> None:
    """Shade calls and spans; draw a labeled line at each failed attempt and each mark."""
    moments = []
    for row in timeline.rows[:_MOST_ROWS]:
        # A row of several calls has no single span.
        if row.calls > 1:
            continue
        if row.error:
            color = "tab:red"
        elif row.kind == "call":
            color = "tab:blue"
        else:
            color = "tab:gray"
        axes.axvspan(row.began_s, row.began_s + row.seconds, color=color, alpha=0.12, linewidth=0)
        for timed in row.attempts:
            if not timed.attempt.succeeded:
                moments.append(
                    (timed.ended_s, f"{row.what}: {attempt_words(timed)}", "tab:red", 0.98, "top")
                )
    for mark in timeline.marks[:_MOST_ROWS]:
        moments.append((mark.seconds, mark.label, "tab:brown", 0.02, "bottom"))
    for seconds, label, color, height, alignment in moments:
        axes.axvline(seconds, color=color, linewidth=1)
        text = " ".join(drawn(label).split())[:_LABEL_CHARS]
        # Without this option a dollar sign would begin mathematics.
        shown = axes.text(
            seconds,
            height,
            text,
            transform=axes.get_xaxis_transform(),
            color=color,
            parse_math=False,
        )
        shown.set(fontsize="small", rotation=90, verticalalignment=alignment)
        shown.set_in_layout(False)


# Chrome trace JSON opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

# The format wants a process for each event. The number does not matter.
_PROCESS = {"pid": 1}


class _Slice(NamedTuple):
    """Hold one interval of a track, in seconds."""

    began: float
    ended: float
    name: str
    category: str
    args: dict[str, Any]


def trace_json(timeline: Timeline) -> str:
    """Return calls and attempts as slices, counters as tracks, and marks as instants.

    Summed calls have no time of their own and are left out.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "args": {"name": "oomguard.watch"}, **_PROCESS},
        *_slice_events(sorted(_slices(timeline), key=lambda one: (one.began, -one.ended))),
    ]
    for sample in timeline.samples:
        for key, size in sample.bytes.items():
            counter = {"name": " ".join(key), "ts": _us(sample.seconds), "args": {"bytes": size}}
            events.append({"ph": "C", **counter, **_PROCESS})
    for mark in timeline.marks:
        instant = {"name": drawn(mark.label), "ts": _us(mark.seconds), "tid": 1}
        events.append({"ph": "i", "s": "g", **instant, **_PROCESS})
    return json_line({"traceEvents": events, "displayTimeUnit": "ms"})


def _slices(timeline: Timeline) -> Iterator[_Slice]:
    for row in timeline.rows:
        if row.calls > 1:
            continue
        ended = row.began_s + row.seconds
        yield _Slice(row.began_s, ended, name(row), row.kind, _args(row))
        for timed in row.attempts:
            if timed.attempt.error:
                error = {"error": timed.attempt.error}
            else:
                error = {}
            yield _Slice(
                timed.began_s, min(timed.ended_s, ended), attempt_words(timed), "attempt", error
            )


def _args(row: SeenCall) -> dict[str, Any]:
    numbers = {
        "rows": row.rows,
        "prompt_tokens": row.prompt_tokens,
        "max_new_tokens": row.max_new_tokens,
    }
    peaks = {f"{use.device} {use.what}, peak_bytes": use.peak_bytes for use in row.uses}
    args = {}
    for key, value in (numbers | peaks | {"error": row.error or None}).items():
        if value is not None:
            args[key] = value
    return args


def _slice_events(slices: list[_Slice]) -> Iterator[dict[str, Any]]:
    """Yield the slices, which are sorted by start, on tracks in which all slices nest."""
    # The ends of the open slices of each track.
    tracks: list[list[float]] = []
    for one in slices:
        for open_ends in tracks:
            while open_ends and open_ends[-1] <= one.began:
                open_ends.pop()
        track = 0
        while track < len(tracks) and tracks[track] and one.ended > tracks[track][-1]:
            track += 1
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


# A loop may call generate thousands of times.
MOST_ROWS: Final = 20
_MEMORY: Final = ("memory", "before", "peak", "after", "limit")
_CALLS: Final = ("call", "rows", "tokens", "time", "before", "peak", "after", "attempts")


def tables(timeline: Timeline, *, most_rows: int = MOST_ROWS) -> RenderableType:
    """Return the tables for rich; texts are masked and printable."""
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
    lines: list[str] = []
    # Each table has an empty line on both sides, but one empty line between two is enough.
    for line in map(str.rstrip, captured.get().strip("\n").splitlines()):
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).rstrip("\n")


def memory_rows(uses: Sequence[MemoryUse]) -> list[tuple[str, ...]]:
    """Return a row for each counter, headings first."""
    rows = []
    for use in uses:
        rows.append(
            (
                f"{use.device} {use.what}",
                size(use.before_bytes),
                peak(use),
                size(use.after_bytes),
                size(use.limit_bytes),
            )
        )
    return [_MEMORY, *rows]


def call_rows(rows: Sequence[SeenCall], most_rows: int) -> tuple[list[tuple[str, ...]], int]:
    """Return a row for each call, headings first, and the number of calls left out.

    Of many calls, the failed and the largest ones are shown.
    """
    shown = list(rows)
    # Failures matter most, then the largest calls.
    if len(rows) > most_rows:
        first = sorted(
            range(len(rows)), key=lambda i: (not _failed(rows[i]), -_peak_bytes(rows[i]), i)
        )[:most_rows]
        shown = [rows[i] for i in sorted(first)]
    left_out = sum(row.calls for row in rows) - sum(row.calls for row in shown)
    models = {row.model for row in rows} - {None, ""}
    texts = []
    for row in drawn(tuple(shown)):
        if len(models) > 1:
            texts.append(_row(row, _of_model(row)))
        else:
            texts.append(_row(row, row.what))
    return [_CALLS, *texts], left_out


def _below(timeline: Timeline, left_out: int) -> list[str]:
    lines = []
    if left_out:
        lines.append(f"{left_out} more calls are in .rows and the CSV")
    if any(use.sampled for use in timeline.uses):
        lines.append(
            f"~ largest sample, taken every {timeline.sample_every_s:g} s; the other peaks "
            "are exact"
        )
    if timeline.error:
        lines.append(f"ended with {drawn(timeline.error)}")
    if not timeline.samples:
        lines += timeline.notes or ("the watch recorded nothing: the program did not enter it",)
    return lines


def _row(row: SeenCall, what: str) -> tuple[str, ...]:
    use = row.use
    if row.calls != 1:
        what = f"{what}, {row.calls:,} calls"
    if use is None:
        memory = ("", "", "")
    else:
        memory = (size(use.before_bytes), peak(use), size(use.after_bytes))
    outcome = ", ".join(filter(None, (attempts(row), row.error)))
    return (
        what,
        "" if row.rows is None else f"{row.rows:,}",
        tokens(row),
        f"{row.seconds:.1f} s",
        *memory,
        outcome,
    )


def _of_model(row: SeenCall) -> str:
    """Return a call with its model last, so that a narrow terminal cuts only the model."""
    if row.model:
        return f"{row.what} ({row.model})"
    return row.what


def _failed(row: SeenCall) -> bool:
    return bool(row.error) or any(not timed.attempt.succeeded for timed in row.attempts)


def _peak_bytes(row: SeenCall) -> int:
    if row.use is None:
        return 0
    return row.use.peak_bytes or 0


def _table(rows: Sequence[Sequence[str]]) -> RenderableType:
    """Return a table without its empty columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    kept = []
    for i in range(len(rows[0])):
        if any(row[i] for row in rows[1:]):
            kept.append(i)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i in kept:
        is_text = rows[0][i] in {"memory", "call", "attempts"}
        table.add_column(rows[0][i], justify="left" if is_text else "right", no_wrap=not is_text)
    for row in rows[1:]:
        table.add_row(*(Text(row[i]) for i in kept))
    return table
