"""A watch's timeline drawn by matplotlib: a panel for each device, with its counters, its limit, calls, failures and marks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from oomguard.errors import UsageError
from oomguard.facts import GIB, MIB, format_gib
from oomguard.installation import install_hint
from oomguard.report.presentable import drawn
from oomguard.report.timeline_words import attempt_words
from oomguard.timeline import ALLOCATED, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ROWS: Final = 400
_LABEL_CHARS: Final = 40


def figure(timeline: Timeline) -> Figure:
    """Return the plot; raises UsageError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = f'{install_hint("plots")}; or, without it, seen.to_trace("watch.trace.json") for ui.perfetto.dev'
        raise UsageError("matplotlib draws the plot, and it is not installed", hint=hint) from None
    devices = list(dict.fromkeys(key.device for sample in timeline.samples for key in sample.bytes))
    if not devices:
        empty = Figure(figsize=(9.6, 2))
        words = "\n".join(["Nothing was seen: no counter was read.", *drawn(timeline.notes)])
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


def _draw_counters(axes: Axes, timeline: Timeline, device: str) -> None:
    """Draw each counter of a device, the limit, and the exact peak of each call: torch does not say when in the call it was."""
    keys = list(dict.fromkeys(key for sample in timeline.samples for key in sample.bytes if key.device == device))
    limit = max((timeline.limits[key] for key in keys if key in timeline.limits), default=0)
    peaks = [use.peak_bytes or 0 for use in timeline.uses if use.device == device]
    unit, unit_name = (GIB, "GiB") if max([limit, *peaks]) >= GIB else (MIB, "MiB")
    for key in keys:
        points = [(sample.seconds, sample.bytes[key] / unit) for sample in timeline.samples if key in sample.bytes]
        seconds, sizes = zip(*points, strict=True)
        axes.plot(seconds, sizes, marker="." if len(points) == 1 else "", label=key.what)
    if limit:
        axes.axhline(limit / unit, color="tab:red", linestyle="--", label=f"limit {format_gib(limit)}")
    peak_label = "peak of a call"
    for row in timeline.rows[:_MOST_ROWS]:
        peak = next((use.peak_bytes for use in row.uses if (use.device, use.what) == (device, ALLOCATED)), None)
        if row.kind == "call" and row.calls == 1 and peak is not None:
            ends = row.began_s, row.began_s + row.seconds
            axes.hlines(peak / unit, *ends, color="tab:blue", linestyle=":", label=peak_label)
            peak_label = ""
    axes.set_title(device, loc="left")
    axes.set_ylabel(unit_name)
    axes.set_ylim(bottom=0)


def _draw_events(axes: Axes, timeline: Timeline) -> None:
    """Shade calls and spans; draw a labelled line at each failed attempt and each mark."""
    moments = []
    for row in timeline.rows[:_MOST_ROWS]:
        if row.calls > 1:
            continue
        color = "tab:red" if row.error else "tab:blue" if row.kind == "call" else "tab:gray"
        axes.axvspan(row.began_s, row.began_s + row.seconds, color=color, alpha=0.12, linewidth=0)
        moments += [
            (timed.ended_s, f"{row.what}: {attempt_words(timed)}", "tab:red", 0.98, "top")
            for timed in row.attempts
            if not timed.attempt.succeeded
        ]
    moments += [(mark.seconds, mark.label, "tab:brown", 0.02, "bottom") for mark in timeline.marks[:_MOST_ROWS]]
    for seconds, label, color, height, alignment in moments:
        axes.axvline(seconds, color=color, linewidth=1)
        text = " ".join(drawn(label).split())[:_LABEL_CHARS]
        # A dollar sign begins mathematics otherwise: a label is text.
        shown = axes.text(seconds, height, text, transform=axes.get_xaxis_transform(), color=color, parse_math=False)
        shown.set(fontsize="small", rotation=90, verticalalignment=alignment)
        shown.set_in_layout(False)
