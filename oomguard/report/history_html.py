"""Past runs as one self-contained page: incidents over time, by command, what was changed, predicted beside measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from oomguard.past_runs import RESULTS, PastRun
from oomguard.report.history_picture import history_picture
from oomguard.report.history_rows import Rows, change_rows, command_rows, prediction_rows, run_rows
from oomguard.report.html_parts import element, escaped
from oomguard.report.html_style import DARK, PAGE_STYLE, STYLE
from oomguard.report.picture_svg import svg
from oomguard.report.presentable import drawn

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


def page(runs: Sequence[PastRun], *, nothing: str) -> str:
    """Return the page; it loads nothing and has no script.

    Args:
        runs: the newest first.
        nothing: the sentence of a page without runs.
    """
    title = f"oomguard history: {_counts(runs)}" if runs else "oomguard history"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>{escaped(title)}</title>\n'
        f"<style>{STYLE}{DARK}{PAGE_STYLE}{_STYLE}</style>\n</head>\n"
        f'<body>\n<main class="oomguard">\n{element("h1", title)}{_parts(runs, nothing)}</main>\n</body>\n</html>\n'
    )


def _counts(runs: Sequence[PastRun]) -> str:
    counts = Counter(run.result for run in runs)
    words = ", ".join(f"{counts[result]:,} {result}" for result in RESULTS if counts[result])
    return f"{len(runs):,} {'run' if len(runs) == 1 else 'runs'} ({words})"


def _parts(runs: Sequence[PastRun], nothing: str) -> str:
    if not runs:
        return element("p", drawn(nothing))
    parts = [_headed("Incidents over time", f'<div class="wide">\n{svg(history_picture(runs))}</div>\n')]
    parts.append(_headed("By command", _table(command_rows(runs), wide={0})))
    changes = change_rows(runs)
    if len(changes) > 1:
        parts.append(_headed("What was changed", _table(changes)))
    predictions, sentence = prediction_rows(runs, most=MOST_ROWS)
    if len(predictions) > 1 or sentence:
        told = element("p", sentence) if sentence else ""
        table = _table(predictions) if len(predictions) > 1 else ""
        parts.append(_headed("Predicted beside measured", told + table))
    parts.append(_headed("Runs", _table(run_rows(runs[:MOST_ROWS]), wide={3, 4}, left_out=len(runs) - MOST_ROWS)))
    return "".join(parts)


def _headed(title: str, inside: str) -> str:
    return f"{element('h2', title, 'headline')}{inside}"


def _table(rows: Rows, *, wide: set[int] | None = None, left_out: int = 0) -> str:
    """Return a table, its first rows where there are very many; the columns ``wide`` hold long texts."""
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in rows[0])
    names = ["command" if i in (wide or ()) else "short" for i in range(len(rows[0]))]
    lines = (
        "".join(f'<td class="{name}">{escaped(cell)}</td>' for name, cell in zip(names, row, strict=True))
        for row in rows[1 : MOST_ROWS + 1]
    )
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    left_out = max(left_out, len(rows) - 1 - MOST_ROWS)
    more = element("p", f"{left_out:,} more: oomguard history --format json --limit 0", "dim") if left_out > 0 else ""
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n{more}'
