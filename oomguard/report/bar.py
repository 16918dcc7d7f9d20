"""Compute the shares of the memory bar, for the terminal, the HTML page and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from oomguard.core.facts import format_gib
from oomguard.core.incident import Budget

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

FREE: Final = "free"
REST: Final = "not accounted for"
# A smaller rest is only rounding of printed figures.
_SMALLEST_REST_RATIO: Final = 0.01

# Colors of xterm's fixed palette with a contrast of 4.5:1 on black and on white, as a test checks.
# Terminals with fewer colors show the same texts without color.
RED: Final = "color(131)"
GREEN: Final = "color(29)"
BLUE: Final = "color(63)"
PURPLE: Final = "color(98)"
MAGENTA: Final = "color(163)"
GRAY: Final = "color(243)"
# With fewer colors, two parts could look alike.
_FEWEST_COLORS: Final = frozenset({"256", "truecolor"})

# One color for each part, the same in every report: (terminal, light page, dark page).
COLORS: Final[dict[str, tuple[str, str, str]]] = {
    "weights": (BLUE, "#3b6fd4", "#6f9bff"),
    "tensors": (BLUE, "#3b6fd4", "#6f9bff"),
    "KV cache": (GREEN, "#2e9a5b", "#53c785"),
    "activations": (MAGENTA, "#d0a215", "#e6c250"),
    "CUDA graphs": (PURPLE, "#a64ac9", "#c98be6"),
    "non-torch": (GRAY, "#1c93a8", "#4fc3d6"),
    "reserved by torch, unused": (PURPLE, "#c9772b", "#e8a365"),
    "not shown as this process's": (RED, "#cc4136", "#f0796f"),
    "other processes": (RED, "#cc4136", "#f0796f"),
    "in use before the KV cache": (BLUE, "#3b6fd4", "#6f9bff"),
    "in use at the start": (RED, "#cc4136", "#f0796f"),
    FREE: (GRAY, "#c9ced6", "#4a5160"),
    REST: (GRAY, "#e6e9ee", "#2c313b"),
}
_OTHERS: Final = (
    (PURPLE, "#8a5a44", "#c49a86"),
    (GRAY, "#5b7083", "#9db2c4"),
    (MAGENTA, "#b0478c", "#e08bc2"),
)


class BarSegment(NamedTuple):
    """Hold one part of the bar; ``ratio`` is its share of the whole, 0 to 1."""

    name: str
    bytes: int
    ratio: float
    source: str
    color: tuple[str, str, str]


def segments(budget: Budget) -> tuple[BarSegment, ...]:
    """Return the parts with their shares of the device, and the unnamed rest.

    Empty if no part is known. If the total is unknown, or the parts add up to more, the shares
    refer to the sum of the parts.
    """
    parts = []
    for part in budget.parts:
        if part.bytes > 0:
            parts.append(part)
    known = sum(part.bytes for part in parts)
    total = max(budget.device_total_bytes or 0, known)
    if not parts or total <= 0:
        return ()
    others = iter(_OTHERS * len(parts))
    rows = []
    for part in parts:
        rows.append(
            BarSegment(
                part.name,
                part.bytes,
                part.bytes / total,
                part.source,
                COLORS.get(part.name) or next(others),
            )
        )
    if total - known > _SMALLEST_REST_RATIO * total:
        rows.append(BarSegment(REST, total - known, (total - known) / total, "", COLORS[REST]))
    return tuple(rows)


def contradiction(budget: Budget) -> str:
    """Return the line about printed numbers that contradict each other; "" if there are none."""
    if budget.conflict is None:
        return ""
    return f"The printed numbers contradict each other: {budget.conflict}."


def cells(shares: Sequence[BarSegment], width: int) -> list[int]:
    """Return the number of cells for each segment; together they fill ``width``.

    Each segment gets at least one cell if there are enough cells.
    """
    if len(shares) >= width:
        return [1] * width + [0] * (len(shares) - width)
    exact = [segment.ratio * width for segment in shares]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) > width:
        counts[max(range(len(counts)), key=lambda i: (counts[i] > 1, counts[i] - exact[i]))] -= 1
    while sum(counts) < width:
        counts[max(range(len(counts)), key=lambda i: exact[i] - counts[i])] += 1
    return counts


def percent(ratio: float) -> str:
    """Format a share (0 to 1) as a short percentage: 0.4%, 12%."""
    value = 100 * ratio
    if 0 < value < 0.1:
        return "<0.1%"
    if value < 10:
        return f"{value:.1f}%"
    return f"{value:.0f}%"


# A longer bar is not more exact for the eye.
BAR_CELLS: Final = 60
# The columns of the legend need space between them.
_GAP: Final = 2
# Without color, the pattern distinguishes the parts.
_PATTERNS: Final = "█▓▒▚▞▐▄▌"
Row = tuple[str, str, str]
# A terminal has little space for a legend.
_SHORT_NAMES: Final = {"reserved by torch, unused": "cached by torch"}
_OTHER_TENSORS: Final = "tensors besides "
_ASCII: Final = "#=+*o%@x"


@dataclass(frozen=True, slots=True)
class BudgetBar:
    """Draw a budget as a bar with a legend, for any width, color and encoding.

    ``table`` puts one part of the legend on each line.
    """

    budget: Budget
    ascii_only: bool = False
    table: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = segments(self.budget)
        total = self.budget.device_total_bytes
        colored = has_colors(console)
        marks = self._marks(parts)
        if total:
            yield from self._bar(parts, marks, total, options.max_width, colored=colored)
        rows = [_row(segment, shares=bool(total)) for segment in parts]
        yield from self._legend(parts, marks, rows, options.max_width, colored=colored)

    def _marks(self, parts: tuple[BarSegment, ...]) -> list[str]:
        """Return one pattern for each part, because a color alone does not distinguish enough."""
        # Without a bar there is nothing to distinguish.
        if not self.budget.device_total_bytes:
            return ["-"] * len(parts)
        fixed = {FREE: "░", REST: "·"}
        patterns = _PATTERNS
        if self.ascii_only:
            fixed = {FREE: ".", REST: " "}
            patterns = _ASCII
        marks = []
        used = 0
        for part in parts:
            marks.append(fixed.get(part.name) or patterns[used % len(patterns)])
            used += part.name not in fixed
        return marks

    def _bar(
        self,
        parts: tuple[BarSegment, ...],
        marks: list[str],
        total: int,
        width: int,
        *,
        colored: bool,
    ) -> RenderResult:
        from rich.text import Text

        end = f" {format_gib(total)}"
        fits_on_line = width - len(end) >= BAR_CELLS // 3
        room = min(BAR_CELLS, width - len(end) if fits_on_line else width)
        line = Text(no_wrap=True)
        # A rest drawn as blanks needs an edge.
        if self.ascii_only:
            room -= 2
            line.append("|")
        for part, mark, count in zip(parts, marks, cells(parts, room), strict=True):
            line.append(mark * count, style=_style(part, colored=colored))
        if self.ascii_only:
            line.append("|")
        yield line.append(end) if fits_on_line else line
        if not fits_on_line:
            yield Text(end.strip())

    def _legend(
        self,
        parts: tuple[BarSegment, ...],
        marks: list[str],
        rows: list[Row],
        width: int,
        *,
        colored: bool,
    ) -> RenderResult:
        """Yield the legend in as many columns as fit; a table has one part on each line."""
        from rich.text import Text

        columns = [[*range(len(rows))]]
        for count in () if self.table else (3, 2):
            split = [[*range(first, len(rows), count)] for first in range(min(count, len(rows)))]
            if (
                sum(map(sum, (_widths(rows, column) for column in split)))
                + 2 * _GAP * (len(split) - 1)
                <= width
            ):
                columns = split
                break
        widths = [_widths(rows, column) for column in columns]
        is_narrow = len(columns) == 1 and sum(widths[0]) > width
        for start in range(0, len(rows), len(columns)):
            line = Text()
            for column in range(min(len(columns), len(rows) - start)):
                place = start + column
                part = parts[place]
                name, size, share = rows[place]
                if column:
                    line.append(" " * 2 * _GAP)
                line.append(marks[place], style=_style(part, colored=colored))
                # Too narrow for columns, so the line may wrap.
                if is_narrow:
                    line.append(f" {name} {size} {share}".rstrip())
                    continue
                _, names, sizes, shares = widths[column]
                line.append(f" {name:<{names - 1}} {size:>{sizes - 1}}")
                if shares:
                    line.append(f" {share:>{shares - 1}}")
                if self.table and part.source and len(line) + len(part.source) + _GAP <= width:
                    line.append(f"  {part.source}")
            yield line


def has_colors(console: Console) -> bool:
    """Return whether a console shows the palette above exactly."""
    return console.color_system in _FEWEST_COLORS and not console.no_color


def _style(part: BarSegment, *, colored: bool) -> str:
    if colored:
        return part.color[0]
    return ""


def _widths(rows: list[Row], column: list[int]) -> tuple[int, int, int, int]:
    """Return the columns of a mark, a name, a size and a share, each with its space before."""
    name_cells = 0
    size_cells = 0
    share_cells = 0
    for place in column:
        name, size, share = rows[place]
        name_cells = max(name_cells, len(name))
        size_cells = max(size_cells, len(size))
        share_cells = max(share_cells, len(share))
    return 1, 1 + name_cells, 1 + size_cells, 1 + share_cells if share_cells else 0


def _row(segment: BarSegment, *, shares: bool) -> Row:
    name = segment.name
    if name.startswith(_OTHER_TENSORS):
        name = "other tensors"
    return (
        _SHORT_NAMES.get(name, name),
        format_gib(segment.bytes),
        percent(segment.ratio) if shares else "",
    )
