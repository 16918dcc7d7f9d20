"""Show a diagnosis as Markdown for an issue tracker, in which no log text becomes markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import format_gib
from oomguard.core.incident import EMPTY, Action, Budget, Diagnosis, EngineStart, Evidence, Incident
from oomguard.core.presentable import drawn
from oomguard.remedy.actions import action_why, ruled_out_changes
from oomguard.report.bar import contradiction, percent, segments
from oomguard.report.phrases import (
    ShownIncident,
    capacity,
    echoes,
    instead,
    pastes,
    place,
    settings_of_note,
    shown_once,
    start_title,
    tradeoff,
    what_died,
)
from oomguard.report.snapshot import (
    GROUP_HEADINGS,
    STACK_HEADINGS,
    group_rows,
    sentences,
    stack_rows,
    title,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from oomguard.core.measurements import DeviceMemory

_MARKUP: Final = re.compile(r"[\\`*\[\]<~|&]|(?<![^\W_])_|_(?![^\W_])|^>|^(?:[#+-]|\d+[.)])(?=\s)")
_AS_ENTITIES: Final = {"<": "&lt;", "&": "&amp;"}
# A zero-width space after its sign disables a mention or a reference.
_REFERENCE: Final = re.compile(r"@(?=\w)|#(?=\d)|\bGH-(?=\d)", re.IGNORECASE)
_BACKTICKS: Final = re.compile(r"`+")


def to_markdown(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as Markdown, with tables and the folded lines of the log."""
    shown = drawn(diagnosis)
    if shown.incidents:
        text = "\n".join(_incident(group, shown.source) for group in shown_once(shown))
    else:
        text = f"**{inline(shown.source or 'text')}**: {shown.without_failure}\n"
        for start in shown.starts:
            text += f"\n{_start(start)}"
    for device in shown.snapshot.devices if shown.snapshot else ():
        text += f"\n{_device(device)}"
    # The note about an empty input repeats what the text already says.
    for note in shown.notes:
        if note != EMPTY:
            text += f"\n- note: {inline(note)}\n"
    return text


def inline(text: object) -> str:
    """Escape a text for a paragraph, so that it appears exactly as it is."""
    words = " ".join(str(text).split())
    marked = _MARKUP.sub(
        lambda m: _AS_ENTITIES.get(m.group(), f"{m.group()[:-1]}\\{m.group()[-1]}"), words
    )
    return _REFERENCE.sub(lambda m: f"{m.group()}&#8203;", marked)


def cell(text: object) -> str:
    """Escape a text for a table cell, with its line breaks."""
    return "<br>".join(map(inline, str(text).split("\n")))


def code(text: str) -> str:
    """Return a text as code for a paragraph or a cell, without mentions or references."""
    words = " ".join(text.split())
    if not words:
        return ""
    # a table splits cells before code spans, so only entities are safe
    if set(words) & set("|`\\"):
        plain = [c if c.isalnum() or c in " .=" else f"&#{ord(c)};" for c in words]
        return f"<code>{''.join(plain)}</code>"
    return f"`{words}`"


def fenced(text: str) -> list[str]:
    """Return a text as a fenced block, with a fence longer than any backticks in it."""
    # The text may contain a fence of its own, such as a quoted report.
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=0)
    # A fence must be longer than any run of backticks in the text.
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *text.split("\n"), fence]


def _incident(shown: ShownIncident, source: str) -> str:
    incident = shown.incident
    lines = [
        f"### {inline(what_died(incident))}",
        "",
        f"{code(incident.kind)} {inline(place(incident, source))}",
    ]
    if text := echoes(shown):
        lines += ["", inline(text)]
    if incident.actions:
        lines += ["", "**What to do**", ""]
        for number, action in enumerate(incident.actions, 1):
            lines.append(f"{number}. {_action(action)}")
    lines += ["", *_budget(incident.budget)]
    for cause in incident.causes:
        name = f"{code(cause.id)}, confidence {cause.confidence:.2f}"
        lines += [f"**{inline(cause.title)}** ({name}). {inline(cause.explanation)}", ""]
    lines += [f"- not changed: {inline(text)}" for text in ruled_out_changes(incident)]
    for other in incident.alternatives:
        paste = " or ".join(map(code, pastes(other)))
        if tradeoff(other):
            cost = f" Cost: {inline(tradeoff(other))}"
        else:
            cost = ""
        what = paste or inline(instead(other))
        lines.append(f"- instead: {what} ({inline(other.why_not)}){cost}")
    if incident.unknown:
        lines.append(f"- unknown: {' '.join(map(inline, incident.unknown))}")
    if incident.missing:
        lines.append(
            f"- to decide: {inline(incident.missing.what)}: {code(incident.missing.command)}"
        )
    return "\n".join([*lines, *_evidence(incident)]) + "\n"


def _action(action: Action) -> str:
    if action.effect is None:
        effect = ""
    else:
        effect = f" ({action.effect})"
    texts = [f"**{inline(action.title)}**{effect}", inline(action_why(action))]
    texts += [code(action.command)] if action.command else []
    texts += [f"Cost: {inline(action.cost)}"] if action.cost else []
    texts += (
        [f"oomguard run needs permission: {inline(action.blocked_by)}"] if action.blocked_by else []
    )
    return "<br>".join(filter(None, texts))


def _budget(budget: Budget) -> list[str]:
    parts = segments(budget)
    total = budget.device_total_bytes
    if budget.conflict:
        conflict = [inline(contradiction(budget)), ""]
    else:
        conflict = []
    if not parts:
        return conflict
    if total:
        whole = f"share of {format_gib(total)}"
    else:
        whole = "share"
    rows = [f"| where the bytes went | size | {whole} |", "|---|---:|---:|"]
    for part in parts:
        if total:
            share = cell(percent(part.ratio))
        else:
            share = ""
        rows.append(f"| {cell(part.name)} | {format_gib(part.bytes)} | {share} |")
    return [*rows, "", *conflict]


def _evidence(incident: Incident) -> list[str]:
    evidence = list(incident.wrappers)
    for cause in incident.causes:
        evidence += cause.evidence
    seen: dict[int | str, Evidence] = {}
    for line in (*evidence, *incident.evidence):
        if line.line is None:
            seen[line.text] = line
        else:
            seen[line.line] = line
    if not seen:
        return []
    lines = sorted(seen.values(), key=lambda line: (line.line is None, line.line or 0))
    summary = f"<details><summary>Evidence ({len(lines)})</summary>"
    return ["", summary, "", *fenced("\n".join(map(str, lines))), "", "</details>"]


def _device(device: DeviceMemory) -> str:
    lines = [
        f"### {inline(title(device))}",
        "",
        *(f"{inline(text)}\n" for text in sentences(device)),
    ]
    if device.stacks:
        lines += [*_table(STACK_HEADINGS, stack_rows(device), "---:|---:|---:|---"), ""]
    if device.groups:
        lines += [*_table(GROUP_HEADINGS, group_rows(device), "---|---:|---:|---:|---:|---:"), ""]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], aligned: str) -> list[str]:
    body = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return [f"| {' | '.join(headings)} |", f"|{aligned}|", *body]


def _start(start: EngineStart) -> str:
    lines = [f"### {inline(start_title(start))}", ""]
    if settings := settings_of_note(start):
        lines += [", ".join(f"{code(name)} {inline(value)}" for name, value in settings), ""]
    lines += _budget(start.budget)
    if text := capacity(start):
        lines += [inline(text), ""]
    return "\n".join(lines)


# Print what a command shows on a terminal as Markdown: tables, lists, and blocks of text.


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
            lines = []
            for line in text.plain.split("\n"):
                if line.strip():
                    lines.append(inline(line))
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
            import click

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

    def shown(value: Any) -> str:
        return cell(Text.from_markup(value).plain if isinstance(value, str) else value)

    columns = []
    for column in table.columns:
        columns.append(map(shown, column.cells))
    rows = zip(*columns, strict=True)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if is_continued and not table.show_header:
        return lines
    headings = [shown(column.header) for column in table.columns]
    rule = "|".join("---:" if column.justify == "right" else "---" for column in table.columns)
    return [f"| {' | '.join(headings)} |", f"|{rule}|", *lines]
