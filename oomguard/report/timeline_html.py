"""What a watch saw as one self-contained page: the picture, and the tables below it."""

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
_STYLE: Final = """
main{max-width:64rem}.oomguard .wide th,.oomguard .wide td{white-space:nowrap;font-variant-numeric:tabular-nums}
.oomguard .timeline{width:100%;min-width:44rem;height:auto}
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def page(timeline: Timeline) -> str:
    """Return the page; it loads nothing and has no script."""
    title = f"oomguard: memory over {timeline.seconds:.1f} s"
    parts = [element("h1", title), f'<div class="wide">\n{svg(timeline_picture(timeline))}</div>\n']
    if timeline.error:
        parts.append(element("p", f"ended with {drawn(timeline.error)}"))
    if timeline.uses:
        parts += [element("h2", "Memory", "title"), _table(memory_rows(timeline.uses))]
    rows, left_out = call_rows(timeline.rows, MOST_ROWS)
    if len(rows) > 1:
        parts += [element("h2", "Calls", "title"), _table(rows)]
    if left_out:
        parts.append(element("p", f"{left_out} more calls: in the CSV", "dim"))
    if any(use.sampled for use in timeline.uses):
        every = f"one every {timeline.sample_every_s:g} s"
        parts.append(element("p", f"~ the largest of samples, {every}; the other peaks are exact", "dim"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}{DARK}{PAGE_STYLE}{_STYLE}</style>\n</head>\n"
        f'<body>\n<main class="oomguard">\n{"".join(parts)}</main>\n</body>\n</html>\n'
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>\n" for row in rows[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
