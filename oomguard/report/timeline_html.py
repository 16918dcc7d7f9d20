"""What a watch saw as one self-contained page, or in a notebook's cell: the picture, and the tables below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from oomguard.report.html_parts import element, escaped
from oomguard.report.html_style import DARK, PAGE_STYLE, STYLE
from oomguard.report.picture_svg import svg
from oomguard.report.presentable import drawn
from oomguard.report.timeline_picture import timeline_picture
from oomguard.report.timeline_table import call_rows, memory_rows
from oomguard.timeline import Timeline

MOST_ROWS: Final = 200
MOST_ROWS_OF_CELL: Final = 20
_PAGE_WIDTH: Final = "\nmain{max-width:64rem}"
_STYLE: Final = """
.oomguard .wide th,.oomguard .wide td{white-space:nowrap;font-variant-numeric:tabular-nums}
.oomguard .timeline{width:100%;min-width:44rem;height:auto}
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def page(timeline: Timeline) -> str:
    """Return the page; it loads nothing and has no script."""
    title = f"oomguard: memory over {timeline.seconds:.1f} s"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}{DARK}{PAGE_STYLE}{_PAGE_WIDTH}{_STYLE}</style>\n</head>\n"
        f'<body>\n<main class="oomguard">\n{element("h1", title)}{_parts(timeline, MOST_ROWS)}</main>\n</body>\n</html>\n'
    )


def fragment(timeline: Timeline) -> str:
    """Return the page's parts for a notebook's cell: the styles reach nothing outside, nothing is loaded or run."""
    parts = _parts(timeline, MOST_ROWS_OF_CELL, level="h4")
    return f'<div class="oomguard">\n<style>{STYLE}{DARK}{_STYLE}</style>\n{parts}</div>\n'


def _parts(timeline: Timeline, most_rows: int, *, level: str = "h2") -> str:
    parts = [f'<div class="wide">\n{svg(timeline_picture(timeline))}</div>\n']
    if timeline.error:
        parts.append(element("p", f"ended with {drawn(timeline.error)}"))
    if timeline.uses:
        parts += [element(level, "Memory", "title"), _table(memory_rows(timeline.uses))]
    rows, left_out = call_rows(timeline.rows, most_rows)
    if len(rows) > 1:
        parts += [element(level, "Calls", "title"), _table(rows)]
    if left_out:
        parts.append(element("p", f"{left_out} more calls: in the CSV", "dim"))
    if any(use.sampled for use in timeline.uses):
        every = f"one every {timeline.sample_every_s:g} s"
        parts.append(element("p", f"~ the largest of samples, {every}; the other peaks are exact", "dim"))
    return "".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>\n" for row in rows[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
