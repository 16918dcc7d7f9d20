"""What failed over many logs, on a terminal: a table of groups, or one below the other where the screen is narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomguard.fleet.groups import FleetSummary
from oomguard.report.fleet import headline, rows, sentences

if TYPE_CHECKING:
    from rich.console import Console

_NARROW_COLUMNS: Final = 100
_SHOWN_GROUPS: Final = 50


def print_summary(console: Console, summary: FleetSummary) -> None:
    """Print the groups, the one with most incidents first, and below them what would have fixed most."""
    from rich.text import Text

    console.print(Text(headline(summary), style="bold red" if summary.failed else "green"))
    headings, *groups = rows(summary)
    shown = groups[:_SHOWN_GROUPS]
    if shown:
        console.print()
        (_print_below if console.width < _NARROW_COLUMNS else _print_table)(console, headings, shown)
        console.print()
    if len(groups) > len(shown):
        console.print(
            Text(f"{len(groups) - len(shown):,} smaller groups: --format json, markdown or html", style="dim")
        )
    for sentence in sentences(summary):
        console.print(Text(sentence), soft_wrap=True)


def _print_table(console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i == 0 else "left", no_wrap=i in {0, 4}, overflow="fold")
    for group in groups:
        table.add_row(*(Text(cell, style="bold" if i == 1 else "") for i, cell in enumerate(group)))
    console.print(table)


def _print_below(console: Console, headings: tuple[str, ...], groups: list[tuple[str, ...]]) -> None:
    from rich.text import Text

    for count, cause, *rest in groups:
        number, inputs = count.split("\n")
        what = "incident" if number == "1" else "incidents"
        console.print(Text(f"{number} {what} {inputs}", style="bold").append(f"  {cause.replace(chr(10), ': ')}"))
        for heading, cell in zip(headings[2:], rest, strict=True):
            first, *others = cell.split("\n")
            console.print(Text(f"  {heading}: ", style="dim").append(first, style="not dim"), soft_wrap=True)
            for line in others:
                console.print(Text(f"    {line}"), soft_wrap=True)
