"""An allocation snapshot in HTML: its sentences and tables, and a picture of the memory, which needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from oomguard.facts import format_gib
from oomguard.report.snapshot import GROUP_HEADINGS, STACK_HEADINGS, group_rows, sentences, stack_rows, states, title
from oomguard.snapshots.map import CELLS
from oomguard.snapshots.records import DeviceMemory, MapCell

_COLUMNS: Final = 240
_CELL_WIDTH, _ROW_HEIGHT, _ROW_GAP = 4, 16, 4
_EDGE: Final = 'class="edge"'
_WIDTH: Final = _COLUMNS * _CELL_WIDTH


def snapshot_section(device: DeviceMemory, *, level: int) -> str:
    """Return the section of one device; headings begin at ``level`` (1 to 6). Its texts must be fit to show (``drawn``)."""
    parts = [f'<h{level} class="headline">{escape(title(device))}</h{level}>\n']
    parts += [f"<p>{escape(text)}</p>\n" for text in sentences(device)]
    heading = f"h{level + 1}"
    if device.map:
        parts += [f'<{heading} class="title">Memory map</{heading}>\n', picture(device), _legend(device)]
    if device.stacks:
        rows = _table(STACK_HEADINGS, stack_rows(device), numbers={0, 1, 2})
        parts.append(f'<{heading} class="title">Who holds it</{heading}>\n{rows}')
    if device.groups:
        rows = _table(GROUP_HEADINGS, group_rows(device), numbers={1, 2, 3, 4, 5})
        parts.append(f'<{heading} class="title">Segments</{heading}>\n{rows}')
    kind = "start" if device.refusal is None else ""
    return f'<section class="{kind} snapshot">\n{"".join(parts)}</section>\n'


def picture(device: DeviceMemory) -> str:
    """Return the memory map: the segments end to end, in lines of one width, each part in the colour of its state."""
    cells = sum(part.cells for part in device.map)
    lines = -(-cells // _COLUMNS)
    height = lines * (_ROW_HEIGHT + _ROW_GAP)
    words = ", ".join(f"{name} {format_gib(size)}" for _, name, size in states(device))
    shapes: dict[str, list[str]] = {}
    at = 0
    for part in device.map:
        _draw(part, at, shapes)
        at += part.cells
    drawn = "".join(f'<path {look} d="{"".join(paths)}"/>\n' for look, paths in sorted(shapes.items(), key=_is_edge))
    label = escape(f"Memory map of device {device.index}: {words}", quote=True)
    return (
        f'<svg class="map" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{drawn}</svg>\n'
    )


def _draw(part: MapCell, at: int, shapes: dict[str, list[str]]) -> None:
    """Add the rectangles of one part, one a line that it reaches into, and the mark of a segment that begins, by their look."""
    left, is_first = part.cells, part.begins_segment
    while left:
        line, column = divmod(at, _COLUMNS)
        cells = min(left, _COLUMNS - column)
        x, y, width = column * _CELL_WIDTH, line * (_ROW_HEIGHT + _ROW_GAP), cells * _CELL_WIDTH
        rectangle = f"M{x} {y}h{width}v{_ROW_HEIGHT}h-{width}z"
        shapes.setdefault(f'class="{part.kind}"', []).append(rectangle)
        if part.kind != "live" and part.share:
            shapes.setdefault(f'class="live" opacity="{part.share:.2f}"', []).append(rectangle)
        if is_first:
            shapes.setdefault(_EDGE, []).append(f"M{x} {y - 2}h1v{_ROW_HEIGHT + 4}h-1z")
        at, left, is_first = at + cells, left - cells, False


def _is_edge(look: tuple[str, list[str]]) -> tuple[bool, bool]:
    """Order what is drawn: parts, then how much of them is live, then where segments begin."""
    return look[0] == _EDGE, "opacity" in look[0]


def _legend(device: DeviceMemory) -> str:
    items = "".join(
        f'<span class="key"><span class="swatch {kind}"></span>{escape(name)} {format_gib(size)}</span>\n'
        for kind, name, size in states(device)
    )
    each = format_gib(max(1, -(-device.reserved_bytes // CELLS)) * _COLUMNS)
    note = f"Each line is {each}, the segments one after the other by pool and address; a mark is where one begins."
    return f'<p class="legend">{items}</p>\n<p class="dim">{escape(note)}</p>\n'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]) -> str:
    def cell(tag: str, number: int, text: str) -> str:
        name = ' class="number"' if number in numbers else ""
        return f"<{tag}{name}>{escape(text)}</{tag}>"

    head = "".join(cell("th", number, text) for number, text in enumerate(headings))
    body = "".join(f"<tr>{''.join(cell('td', n, text) for n, text in enumerate(row))}</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'
