"""A page of past runs on a terminal: as rows of a table, or one below the other where the screen is narrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from oomguard.past_runs import NOT_ENDED, PastRun
from oomguard.report.history import happened, moment, shown_command, status_words, took

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: Final = {"ran": "green", "repaired": "yellow", "failed": "bold red", "stopped": "dim", NOT_ENDED: "dim"}
PAGE_RUNS: Final = 100
_MOMENT_CHARS: Final = 16


def print_table(console: Console, pages: Iterable[Sequence[PastRun]]) -> None:
    """Print a row a run; the headings once, and the columns of all pages as wide as those of the first."""
    widths = (0, 0)
    for page in pages:
        if not any(widths):
            console.print()
            may_go_on = len(page) >= PAGE_RUNS
            widths = len(str(page[0].number)), max(map(len, _STYLES)) if may_go_on else 0
            _print_rows(console, page, widths, has_headings=True)
        else:
            _print_rows(console, page, widths, has_headings=False)
    console.print()


def _print_rows(console: Console, runs: Sequence[PastRun], widths: tuple[int, int], *, has_headings: bool) -> None:
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_header=has_headings, show_edge=False)
    table.add_column("run", justify="right", no_wrap=True, min_width=max(len("run"), widths[0]))
    table.add_column("began", no_wrap=True, min_width=_MOMENT_CHARS)
    table.add_column("result", no_wrap=True, min_width=max(len("result"), widths[1]))
    table.add_column("command, what failed, what was changed")
    for run in runs:
        lines = [Text(shown_command(run), style="bold"), *(Text(line) for line in happened(run))]
        result = Text(run.result, style=_STYLES[run.result]).append(f"\n{status_words(run)}", style="not bold dim")
        table.add_row(str(run.number), f"{moment(run.began_at)}\n{took(run)}", result, Text("\n").join(lines))
    console.print(Padding(table, (0, 1)))


def print_below(console: Console, pages: Iterable[Sequence[PastRun]]) -> None:
    """Print what a row has, indented below the run's number."""
    from rich.padding import Padding
    from rich.text import Text

    for run in chain.from_iterable(pages):
        console.print(Text(f"{run.number} ").append(run.result, style=_STYLES[run.result]))
        ended = ", ".join(filter(None, (moment(run.began_at), took(run), status_words(run))))
        lines = [Text(ended, style="dim"), Text(shown_command(run), style="bold"), *map(Text, happened(run))]
        console.print(Padding(Text("\n").join(lines), (0, 0, 0, 2)))
