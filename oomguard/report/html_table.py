"""Tables of texts, and the self-contained page that holds them: it loads nothing and has no script."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from oomguard.report.html_parts import element, escaped
from oomguard.report.html_style import DARK, PAGE_STYLE, STYLE

Rows = list[tuple[str, ...]]
MOST_ROWS: Final = 200
_STYLE: Final = """
main{max-width:64rem}
.oomguard .timeline{width:100%;min-width:44rem;height:auto}
.oomguard h2.headline{margin-top:2rem}
.oomguard table{width:100%}
.oomguard th{white-space:nowrap;overflow-wrap:normal}
.oomguard th,.oomguard td{border-bottom:1px solid var(--line);padding:.35rem 1rem .35rem 0}
.oomguard td{overflow-wrap:normal;font-variant-numeric:tabular-nums}
.oomguard .command{min-width:16rem;overflow-wrap:anywhere;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
.oomguard .short{white-space:pre}
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def table_page(title: str, parts: str) -> str:
    """Return the page of that title; ``parts`` are its elements below the heading."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}{DARK}{PAGE_STYLE}{_STYLE}</style>\n</head>\n"
        f'<body>\n<main class="oomguard">\n{element("h1", title)}{parts}</main>\n</body>\n</html>\n'
    )


def html_table(rows: Rows, others: str, *, wide: Collection[int] = (), left_out: int = 0) -> str:
    """Return a table, its first rows where there are very many.

    Args:
        rows: the headings, then the rows, fit to show.
        others: the command that shows all of them.
        wide: the columns that hold long texts.
        left_out: how many rows were left out before.
    """
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in rows[0])
    names = ["command" if i in wide else "short" for i in range(len(rows[0]))]
    lines = (
        "".join(f'<td class="{name}">{escaped(cell)}</td>' for name, cell in zip(names, row, strict=True))
        for row in rows[1 : MOST_ROWS + 1]
    )
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    left_out = max(left_out, len(rows) - 1 - MOST_ROWS)
    more = element("p", f"{left_out:,} more: {others}", "dim") if left_out > 0 else ""
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{more}'


def headed(title: str, inside: str) -> str:
    """Return elements below a heading of the second level."""
    return f"{element('h2', title, 'headline')}{inside}"
