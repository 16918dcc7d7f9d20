"""Draw the bar of where the bytes went on a console of any width, with or without colour and Unicode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomguard.facts import format_gib
from oomguard.incident import Budget
from oomguard.report.bar import FREE, REST, Segment, cells, percent, segments

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

BAR_CELLS: Final = 60
_GAP: Final = 2
# Without colour the pattern tells the parts apart.
_PATTERNS: Final = "█▓▒▚▞▐▄▌"
Row = tuple[str, str, str]
_ASCII: Final = "#=+*o%@x"


@dataclass(frozen=True, slots=True)
class BudgetBar:
    """A budget as a bar and its legend; ``table`` makes the legend a table with one part a line."""

    budget: Budget
    ascii_only: bool = False
    table: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = segments(self.budget)
        total = self.budget.device_total_bytes
        marks = self._marks(parts, colored=console.color_system is not None and not console.no_color)
        if total:
            yield from self._bar(parts, marks, total, options.max_width)
        rows = [_row(segment, shares=bool(total)) for segment in parts]
        yield from self._legend(parts, marks, rows, options.max_width)
        if not total:
            from rich.text import Text

            yield Text("of a device whose size is not known", style="dim")

    def _marks(self, parts: tuple[Segment, ...], *, colored: bool) -> list[str]:
        if not self.budget.device_total_bytes:  # no bar: nothing to tell apart
            return ["-"] * len(parts)
        fixed = {FREE: ".", REST: " "} if self.ascii_only else {FREE: "░", REST: "·"}
        patterns = _ASCII if self.ascii_only else "█" if colored else _PATTERNS
        marks, used = [], 0
        for part in parts:
            marks.append(fixed.get(part.name) or patterns[used % len(patterns)])
            used += part.name not in fixed
        return marks

    def _bar(self, parts: tuple[Segment, ...], marks: list[str], total: int, width: int) -> RenderResult:
        from rich.text import Text

        end = f" {format_gib(total)}"
        beside = width - len(end) >= BAR_CELLS // 3
        room = min(BAR_CELLS, width - len(end) if beside else width)
        line = Text(no_wrap=True)
        if self.ascii_only:  # a rest drawn as blanks needs an edge
            room -= 2
            line.append("|")
        for part, mark, count in zip(parts, marks, cells(parts, room), strict=True):
            line.append(mark * count, style=part.color[0])
        if self.ascii_only:
            line.append("|")
        yield line.append(end) if beside else line
        if not beside:
            yield Text(end.strip())

    def _legend(self, parts: tuple[Segment, ...], marks: list[str], rows: list[Row], width: int) -> RenderResult:
        """Yield as many parts a line as fit, in columns; one part a line in a table or if no two fit."""
        from rich.text import Text

        names = max((len(row[0]) for row in rows), default=0)
        sizes = max((len(row[1]) for row in rows), default=0)
        shares = max((len(row[2]) for row in rows), default=0)
        item = 2 + names + 1 + sizes + (1 + shares if shares else 0)
        columns = 1 if self.table else max(1, (width + 2 * _GAP) // (item + 2 * _GAP))
        line = Text()
        for i, (part, mark, (name, size, share)) in enumerate(zip(parts, marks, rows, strict=True)):
            if i and i % columns == 0:
                yield line
                line = Text()
            line.append(" " * 2 * _GAP if i % columns else "").append(mark, style=part.color[0])
            if item <= width:
                line.append(f" {name:<{names}} {size:>{sizes}}" + (f" {share:>{shares}}" if shares else ""))
            else:  # too narrow for columns: the line may wrap
                line.append(f" {name} {size} {share}".rstrip())
            if self.table and part.source and item + len(part.source) + _GAP <= width:
                line.append(f"  {part.source}", style="dim")
        if line:
            yield line


def _row(segment: Segment, *, shares: bool) -> Row:
    return segment.name, format_gib(segment.bytes), percent(segment.ratio) if shares else ""
