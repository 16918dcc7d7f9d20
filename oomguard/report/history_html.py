"""Past runs as one self-contained page: incidents over time, by command, what was changed, predicted beside measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from oomguard.past_runs import RESULTS, PastRun
from oomguard.report.history_picture import history_picture
from oomguard.report.history_rows import change_rows, command_rows, prediction_rows, run_rows
from oomguard.report.html_parts import element
from oomguard.report.html_table import MOST_ROWS, headed, html_table, table_page
from oomguard.report.picture_svg import svg
from oomguard.report.presentable import drawn

_OTHERS: Final = "oomguard history --format json --limit 0"


def page(runs: Sequence[PastRun], *, nothing: str) -> str:
    """Return the page; it loads nothing and has no script.

    Args:
        runs: the newest first.
        nothing: the sentence of a page without runs.
    """
    title = f"oomguard history: {_counts(runs)}" if runs else "oomguard history"
    return table_page(title, _parts(runs, nothing))


def _counts(runs: Sequence[PastRun]) -> str:
    counts = Counter(run.result for run in runs)
    words = ", ".join(f"{counts[result]:,} {result}" for result in RESULTS if counts[result])
    return f"{len(runs):,} {'run' if len(runs) == 1 else 'runs'} ({words})"


def _parts(runs: Sequence[PastRun], nothing: str) -> str:
    if not runs:
        return element("p", drawn(nothing))
    parts = [headed("Incidents over time", f'<div class="wide">\n{svg(history_picture(runs))}</div>\n')]
    parts.append(headed("By command", html_table(command_rows(runs), _OTHERS, wide={0})))
    changes = change_rows(runs)
    if len(changes) > 1:
        parts.append(headed("What was changed", html_table(changes, _OTHERS)))
    predictions, sentence = prediction_rows(runs, most=MOST_ROWS)
    if len(predictions) > 1 or sentence:
        told = element("p", sentence) if sentence else ""
        table = html_table(predictions, _OTHERS) if len(predictions) > 1 else ""
        parts.append(headed("Predicted beside measured", told + table))
    parts.append(
        headed("Runs", html_table(run_rows(runs[:MOST_ROWS]), _OTHERS, wide={3, 4}, left_out=len(runs) - MOST_ROWS))
    )
    return "".join(parts)
