"""Print what a command shows on a terminal as Markdown: tables, lists, and blocks of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# As wide as the Markdown of a page may be before a block of text scrolls.
_COLUMNS: Final = 100


def markdown_console() -> Console:
    """Return a console that writes Markdown to standard output instead of terminal text.

    Bold lines become bold paragraphs, other lines a list, tables become tables. Anything else
    becomes a block of plain text.
    """
    import io

    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from oomguard.report.markdown import fenced, inline

    class _MarkdownConsole(Console):
        _kind = ""

        def print(self, *objects: Any, **options: Any) -> None:
            has_markup = options.get("markup") is not False
            for shown in objects:
                while isinstance(shown, Padding):
                    shown = shown.renderable  # noqa: PLW2901
                if isinstance(shown, str):
                    plain = Text.from_markup(shown) if has_markup else Text(shown)
                    self._print_lines(plain)
                elif isinstance(shown, Text):
                    self._print_lines(shown)
                elif isinstance(shown, Table):
                    self._write("table", table_lines(shown, is_continued=self._kind == "table"))
                else:
                    with self.capture() as captured:
                        super().print(shown)
                    self._write("block", fenced(captured.get().strip("\n")))

        def _print_lines(self, text: Text) -> None:
            lines = [inline(line) for line in text.plain.split("\n") if line.strip()]
            if text.style == "bold":
                self._write("heading", [f"**{line}**" for line in lines])
            else:
                self._write("list", [f"- {line}" for line in lines])

        def _write(self, kind: str, lines: Sequence[str]) -> None:
            if not lines:
                return
            is_apart = bool(self._kind) and (kind != self._kind or kind in {"heading", "block"})
            self._kind = kind
            # Text for other programs is UTF-8, whatever the terminal's encoding.
            text = "\n".join([*([""] if is_apart else []), *lines, ""])
            click.echo(text.encode("utf-8", "backslashreplace"), nl=False)

    return _MarkdownConsole(
        file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
        width=_COLUMNS,
        no_color=True,
        highlight=False,
        force_terminal=False,
    )


def table_lines(table: Table, *, is_continued: bool = False) -> list[str]:
    """Return a table of rich as lines of Markdown.

    Args:
        table: the table.
        is_continued: whether a table without headings continues the one above.
    """
    from rich.text import Text

    from oomguard.report.markdown import cell

    def shown(value: Any) -> str:
        return cell(Text.from_markup(value).plain if isinstance(value, str) else value)

    rows = zip(*([shown(value) for value in column.cells] for column in table.columns), strict=True)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if is_continued and not table.show_header:
        return lines
    headings = [shown(column.header) for column in table.columns]
    rule = "|".join("---:" if column.justify == "right" else "---" for column in table.columns)
    return [f"| {' | '.join(headings)} |", f"|{rule}|", *lines]
