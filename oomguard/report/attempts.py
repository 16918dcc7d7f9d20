"""Show the attempts of a run: changes, results, and predicted compared with measured values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import REGISTRY, format_gib
from oomguard.core.incident import Attempt, Diagnosis, Effect
from oomguard.core.presentable import drawn, masked
from oomguard.report.html import to_html
from oomguard.report.json import json_line, patch_dict, plain_value, to_dict
from oomguard.report.markdown import cell, inline, to_markdown

if TYPE_CHECKING:
    from rich.table import Table

CHANGED_COLUMNS: Final = 24
NARROW_COLUMNS: Final = 76
# Facts in the table, with their labels.
LABELS: Final = {
    "peak_bytes": "peak",
    "kv_cache_available_bytes": "KV cache",
    "kv_cache_capacity_tokens": "KV tokens",
    "desired_bytes": "claimed",
}


def attempts_table(
    attempts: Sequence[Attempt], *, columns: int = 80, not_ended: Collection[int] = ()
) -> Table:
    """Return the table of attempts for a terminal.

    Args:
        attempts: the attempts, in order; each is one row.
        columns: the width of the terminal.
        not_ended: numbers of attempts that still run, which have no result.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings, *rows = attempt_rows(attempts, not_ended)
    table = Table(
        box=box.SIMPLE_HEAD, title="What oomguard did", title_justify="left", padding=(0, 1)
    )
    widths = {"time": max((len(row[-1]) for row in rows), default=0)}
    if columns >= NARROW_COLUMNS:
        widths["changed"] = CHANGED_COLUMNS
    for name in headings:
        table.add_column(
            "" if name == "attempt" else name,
            justify="right" if name == "time" else "left",
            no_wrap=name == "time",
            # A fixed width, because rich would cut the last column of a narrow screen.
            width=widths.get(name),
        )
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    return table


def attempt_rows(
    attempts: Sequence[Attempt], not_ended: Collection[int] = ()
) -> list[tuple[str, ...]]:
    """Return the table as printable texts, with the headings first."""
    rows = []
    for a in drawn(tuple(attempts)):
        if a.number in not_ended:
            ended = ("not ended", "")
        else:
            ended = (_result(a), f"{a.seconds:.1f} s")
        rows.append((str(a.number), _changed(a), ended[0], checked(a), ended[1]))
    return [("attempt", "changed", "result", "predicted -> measured", "time"), *rows]


def reduction_sentence(attempts: Sequence[Attempt]) -> str | None:
    """Return the sentence about reduced settings that every such run prints.

    None if no setting was reduced, or the last attempt failed.
    """
    patches = [p for a in attempts for p in a.patches if p.effect >= Effect.REDUCES_CAPACITY]
    if not patches or not attempts[-1].succeeded:
        return None
    changes = ", ".join(f"{p.setting} {p.change}" for p in patches)
    return (
        f"Ran with reduced settings: {changes}. "
        f"{' '.join(dict.fromkeys(p.tradeoff for p in patches if p.tradeoff))}"
    )


def attempt_dict(attempt: Attempt) -> dict[str, Any]:
    """Return one attempt as an object of the JSON report, with masked texts."""
    shown = masked(attempt)
    row = {
        "number": shown.number,
        "settings": shown.settings,
        "patches": [patch_dict(p) for p in shown.patches],
        "kind": shown.incident.kind if shown.incident else None,
        "exit_status": shown.exit_status,
        "seconds": round(shown.seconds, 3),
        "measured": shown.measured,
        "ranks": shown.ranks,
    }
    return {key: plain_value(value) for key, value in row.items()}


def report_text(form: str, diagnosis: Diagnosis, attempts: Sequence[Attempt]) -> str:
    """Return the report of a run: the diagnosis, the attempts, and the reduced settings.

    Args:
        form: ``.json``, ``.md`` or ``.html``.
        diagnosis: the last diagnosis of the run.
        attempts: all attempts, in order.
    """
    sentence = drawn(reduction_sentence(attempts))
    if form == ".json":
        answer = to_dict(diagnosis) | {
            "attempts": [attempt_dict(a) for a in attempts],
            "reduced": sentence,
        }
        return json_line(answer) + "\n"
    rows = attempt_rows(attempts)
    if form == ".md":
        lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
        lines.insert(1, f"|{'---|' * len(rows[0])}")
        return "\n".join(
            [to_markdown(diagnosis), *lines, *(["", inline(sentence)] if sentence else []), ""]
        )
    return to_html(diagnosis, table=rows, sentence=sentence)


def _changed(attempt: Attempt) -> str:
    if not attempt.patches:
        return "nothing"
    lines = []
    for patch in attempt.patches:
        arrow = ""
        if patch.old is None:
            arrow = "-> "
        lines.append(f"{patch.setting} {arrow}{patch.change}")
        if patch.permitted_by is None or patch.effect == Effect.OUTPUT_PRESERVING:
            lines.append(f"({patch.effect})")
        else:
            lines.append(f"({patch.effect}, by {patch.permitted_by})")
    return "\n".join(lines)


def _result(attempt: Attempt) -> str:
    if attempt.succeeded:
        return "ran"
    if attempt.incident:
        return attempt.incident.kind.replace("_", " ")
    return attempt.error


def checked(attempt: Attempt) -> str:
    """Return predicted and measured values, one line for each figure; "" without any."""
    predicted = {name: value for patch in attempt.patches for name, value in patch.predicts.items()}
    lines = []
    for name in dict.fromkeys([*predicted, *attempt.measured]):
        if name not in LABELS:
            continue
        if name in predicted:
            before = f"{figure(name, predicted[name])} -> "
        else:
            before = ""
        if name in attempt.measured:
            after = figure(name, attempt.measured[name])
        else:
            after = "not printed"
        lines.append(f"{LABELS[name]} {before}{after}")
    return "\n".join(lines)


def figure(name: str, value: float) -> str:
    """Format the value of a measurable fact with its unit."""
    if name.endswith("_bytes"):
        return format_gib(value)
    if REGISTRY[name].type == "int":
        return f"{value:,.0f}"
    return f"{value:.3g}"
