"""Show the differences of two engine starts on a terminal, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from oomguard.comparison import ComparedStart, ComparedValue, Comparison, Row
from oomguard.core.facts import MIB, format_gib
from oomguard.core.incident import Cause, Diagnosis, Patch
from oomguard.core.presentable import drawn, engine, masked
from oomguard.report.json import SCHEMA, json_line, plain_value, to_dict
from oomguard.report.markdown import cell, code, inline
from oomguard.report.phrases import blocked, change_text, confidence, pastes, place, why

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Longer lines are hard to read.
MAX_COLUMNS: Final = 100
_NO_VALUE: Final = {"left alone": "not set", "not printed": "not printed"}
# A value that the engine did not print, but that follows from printed ones.
_SOLVED: Final = "~"
_SOLVED_NOTE: Final = "~ follows from other figures"
# The user compares these first, so equal values are shown too.
_ALWAYS: Final = frozenset({"version", "budget", "capacity"})


class TableLine(NamedTuple):
    """Hold one line of the table; ``changed`` is None if only one log has the value."""

    name: str
    old: str
    new: str
    difference: str
    changed: bool | None


Rows = list[tuple[Row, bool | None]]


def to_difference_dict(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as an object of schema 1.

    Texts are masked, but each ``source`` is exactly as given.
    """
    shown = masked(comparison)
    rows = _rows(comparison, masked)
    changes = []
    same = []
    one_sided = []
    for row, changed in rows:
        if changed is None:
            one_sided.append(_row(row))
        elif changed:
            changes.append(_row(row))
        else:
            same.append(_row(row))
    explanations = []
    for e in shown.explanations:
        explanations.append({"text": e.text, "kv_cache_bytes": plain_value(e.kv_cache_bytes)})
    return {
        "schema": SCHEMA,
        "headline": shown.headline,
        "differs": comparison.differs,
        "old": _side(comparison.old),
        "new": _side(comparison.new),
        "changes": changes,
        "same": same,
        "one_sided": one_sided,
        "explanations": explanations,
        "unknown": list(map(plain_value, shown.unknown)),
    }


def to_difference_json(comparison: Comparison) -> str:
    """Return the comparison as one line of JSON."""
    return json_line(to_difference_dict(comparison))


def print_difference(console: Console, comparison: Comparison) -> None:
    """Print the comparison: the starts, the table, explanations, and the failure with a fix."""
    shown = drawn(comparison)
    rows = _rows(comparison, drawn)
    if (console.encoding or "").lower().startswith("utf"):
        _print(console, shown, rows, ascii_only=False)
        return
    # An old terminal cannot encode every character of a log, and an error would lose the table.
    with console.capture() as captured:
        _print(console, shown, rows, ascii_only=True)
    console.file.write(captured.get().encode(console.encoding, "replace").decode(console.encoding))


def to_difference_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown in which no log text becomes markup or a mention."""
    shown = drawn(comparison)
    rows = _rows(comparison, drawn)
    lines = [f"### {inline(shown.headline)}", ""]
    for name, side in _sides(shown):
        lines.append(f"- {name}: {code(side.source)} {inline(_about(side))}")
    if table := list(_lines(rows)):
        lines += ["", "| | OLD | NEW | difference |", "|---|---:|---:|---:|"]
        for row in table:
            lines.append(f"| {' | '.join(map(cell, row[:4]))} |")
        lines += ["", inline(_SOLVED_NOTE)] if _is_solved(table) else []
    if same := _same(rows):
        lines += ["", f"The same in both: {inline(same)}."]
    if shown.explanations:
        lines += ["", "**What explains it**", ""]
        for number, e in enumerate(shown.explanations, 1):
            lines.append(f"{number}. {inline(e.text)}")
    if shown.unknown:
        lines += ["", "**Unknown**", ""]
        for text in shown.unknown:
            lines.append(f"- {inline(text)}")
    for name, side in _failures(shown):
        lines += ["", f"**{name} failed: {inline(_failed(side))}**", ""]
        for text in _why_and_fix(side):
            lines.append(f"- {inline(text)}")
        if _paste(side):
            lines.append(f"- {' or '.join(map(code, _paste(side)))}")
    return "\n".join(lines) + "\n"


def _print(console: Console, shown: Comparison, rows: Rows, *, ascii_only: bool) -> None:
    from rich.padding import Padding
    from rich.text import Text

    width = min(console.width, MAX_COLUMNS)

    def write(text: Text | str, indent: int = 0) -> None:
        if isinstance(text, str):
            words = Text(text)
        else:
            words = text
        console.print(
            Padding(words, (0, 0, 0, indent), expand=False) if indent else words, width=width
        )

    write(Text(shown.headline, style="bold"))
    for name, side in _sides(shown):
        write(
            Text(f"{name} ", style="bold").append(
                f"{side.source}: {_about(side)}", style="not bold dim"
            )
        )
    if table := list(_lines(rows)):
        console.print(_table(table, ascii_only=ascii_only), width=width)
        if _is_solved(table):
            write(Text(_SOLVED_NOTE, style="dim"))
    if same := _same(rows):
        write(Text(f"The same in both: {same}", style="dim"))
    if shown.explanations:
        write(Text("\nWhat explains it", style="bold"))
        for number, explanation in enumerate(shown.explanations, 1):
            write(f"{number}. {explanation.text}", 2)
    if shown.unknown:
        write(Text("\nUnknown", style="bold"))
        for text in shown.unknown:
            write(Text(text, style="dim"), 2)
    for name, side in _failures(shown):
        write(Text(f"\n{name} failed: ", style="bold red").append(_failed(side), style="not red"))
        for text in _why_and_fix(side):
            write(text, 2)
        if paste := _paste(side):
            write(Text(" or ".join(paste), style="green"), 5)


def _table(rows: list[TableLine], *, ascii_only: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ASCII2 if ascii_only else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold", min_width=20)
    for title in ("OLD", "NEW", "difference"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        style = {True: "", False: "dim", None: "dim"}[row.changed]
        difference = Text(row.difference, style="bold" if row.changed else style)
        table.add_row(
            Text(row.name, style=style),
            Text(row.old, style=style),
            Text(row.new, style=style),
            difference,
        )
    return table


def _sides(shown: Comparison) -> tuple[tuple[str, ComparedStart], ...]:
    return (("OLD", shown.old), ("NEW", shown.new))


def _failures(shown: Comparison) -> list[tuple[str, ComparedStart]]:
    """Return the failed starts, the newer one first, because the user has to fix that one."""
    failures = []
    for name, side in reversed(_sides(shown)):
        if side.incident is not None:
            failures.append((name, side))
    return failures


def _about(side: ComparedStart) -> str:
    """Return a text such as ``start 2 of 3, vllm 0.32.0, line 14, no failure``."""
    start = side.start
    if side.starts > 1:
        count = f" of {side.starts}"
    else:
        count = ""
    if start.line is None:
        line = "no start-up line, only the failure's message"
    else:
        line = f"line {start.line}"
    if side.incident is None:
        end = "no failure"
    else:
        end = f"failed: {side.incident.kind}"
    return ", ".join(filter(None, (f"start {start.number}{count}", engine(start), line, end)))


def _lines(rows: Rows) -> Iterator[TableLine]:
    """Yield the table's lines: versions, figures, and settings that differ or are unknown."""
    for row, changed in rows:
        if row.kind in _ALWAYS or changed is not False:
            yield TableLine(
                row.name,
                _value(row, row.old),
                _value(row, row.new),
                _difference(row, changed),
                changed,
            )


def _is_solved(rows: list[TableLine]) -> bool:
    return any(row.old.startswith(_SOLVED) or row.new.startswith(_SOLVED) for row in rows)


def _same(rows: Rows) -> str:
    """Return the settings with the same value in both logs."""
    same = []
    for row, changed in rows:
        if row.kind not in _ALWAYS and changed is False:
            same.append(f"{row.name} {_value(row, row.new)}")
    return ", ".join(same)


def _value(row: Row, side: ComparedValue) -> str:
    if side.value is None:
        return _NO_VALUE.get(side.origin, "None")
    amount = _amount(row, side.value)
    return {"default": f"{amount} (default)", "solved": f"{_SOLVED}{amount}"}.get(
        side.origin, amount
    )


def _amount(row: Row, value: object) -> str:
    # A bool is an int too, but True is not a count.
    if isinstance(value, (str, bool)) or not isinstance(value, (int, float)):
        return str(value)
    if row.unit == "bytes":
        if abs(value) >= MIB:
            return format_gib(value)
        return f"{value / 1024:.0f} KiB"
    if row.unit == "tokens":
        return f"{value:,.0f}"
    if row.kind == "capacity":
        return f"{value:.2f}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _difference(row: Row, changed: bool | None) -> str:
    if not changed:
        if changed is None:
            return ""
        return "same"
    if row.difference is not None:
        return f"{'+' if row.difference > 0 else '-'}{_amount(row, abs(row.difference))}"
    return {row.old.origin: "added", row.new.origin: "removed"}.get("left alone", "changed")


def _failed(side: ComparedStart) -> str:
    if side.incident is None:
        return ""
    return side.incident.headline


def _why_and_fix(side: ComparedStart) -> Iterator[str]:
    """Yield the place of the failure, its first cause, and the first fix that may be applied."""
    incident = side.incident
    if incident is None:
        return
    yield f"{incident.kind}, {place(incident)}"
    cause: Cause | None = next(iter(incident.causes), None)
    if cause is not None:
        title = f"{cause.title} ({cause.id}, {confidence(cause.confidence)})"
        yield f"Why: {title}. {cause.explanation}"
    fix = _fix(side)
    if fix is not None:
        if blocked(fix):
            held = f" Not automatic: {blocked(fix)}."
        else:
            held = ""
        yield f"First fix: {fix.setting} {change_text(fix)} [{fix.effect}]: {why(fix)}.{held}"


def _fix(side: ComparedStart) -> Patch | None:
    plan = () if side.incident is None else side.incident.plan
    # The user can apply such a fix at once; others need a permission first.
    for patch in plan:
        if patch.applicable:
            return patch
    return next(iter(plan), None)


def _paste(side: ComparedStart) -> list[str]:
    fix = _fix(side)
    if fix is None:
        return []
    return pastes(fix)


def _rows(comparison: Comparison, fit: Callable[[Row], Row]) -> Rows:
    """Return printable rows, each with whether it changed (None: only one log has it).

    The comparison comes before masking, because two masked values look the same.
    """
    return [(fit(row), row.changed if row.known else None) for row in comparison.rows]


def _side(side: ComparedStart) -> dict[str, Any]:
    incidents = () if side.incident is None else (side.incident,)
    # The same writer gives a start the same keys as in a diagnosis.
    whole = to_dict(Diagnosis(side.source, incidents, side.notes, (side.start,)))
    return {
        "source": side.source,
        "outcome": side.outcome,
        "starts": side.starts,
        **whole["starts"][0],
        "incident": next(iter(whole["incidents"]), None),
        "notes": whole.get("notes", []),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": plain_value(row.name),
        "kind": row.kind,
        "unit": row.unit,
        "old": plain_value(row.old.value),
        "new": plain_value(row.new.value),
        "difference": plain_value(row.difference) if row.known else None,
        "old_origin": row.old.origin,
        "new_origin": row.new.origin,
    }
