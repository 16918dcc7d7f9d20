"""Show a diagnosis as a terminal panel: failure, action, cause, memory bar, unknowns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomguard.core.facts import format_gib
from oomguard.core.incident import EMPTY, Action, Alternative, Budget, Cause, Diagnosis, EngineStart
from oomguard.report.bar import FREE, REST, BarSegment, cells, contradiction, percent, segments
from oomguard.report.presentable import drawn, plain
from oomguard.report.redact import homes_kept, mask
from oomguard.report.snapshot import snapshot_panel
from oomguard.report.wording import (
    ShownIncident,
    action_why,
    capacity,
    confidence,
    decide_by,
    echoes,
    instead,
    pastes,
    place,
    ruled_out_changes,
    settings_of_note,
    shown_causes,
    shown_once,
    start_title,
    tradeoff,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


BAR_CELLS: Final = 60
_GAP: Final = 2
# Without color, the pattern distinguishes the parts.
_PATTERNS: Final = "█▓▒▚▞▐▄▌"
Row = tuple[str, str, str]
_ASCII: Final = "#=+*o%@x"


@dataclass(frozen=True, slots=True)
class BudgetBar:
    """Draw a budget as a bar with a legend, for any width, color and encoding.

    ``table`` puts one part of the legend on each line.
    """

    budget: Budget
    ascii_only: bool = False
    table: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = segments(self.budget)
        total = self.budget.device_total_bytes
        marks = self._marks(
            parts, colored=console.color_system is not None and not console.no_color
        )
        if total:
            yield from self._bar(parts, marks, total, options.max_width)
        rows = [_row(segment, shares=bool(total)) for segment in parts]
        yield from self._legend(parts, marks, rows, options.max_width)
        if not total:
            from rich.text import Text

            yield Text("of a device of unknown size", style="dim")

    def _marks(self, parts: tuple[BarSegment, ...], *, colored: bool) -> list[str]:
        if not self.budget.device_total_bytes:  # without a bar there is nothing to distinguish
            return ["-"] * len(parts)
        if self.ascii_only:
            fixed = {FREE: ".", REST: " "}
        else:
            fixed = {FREE: "░", REST: "·"}
        if self.ascii_only:
            patterns = _ASCII
        elif colored:
            patterns = "█"
        else:
            patterns = _PATTERNS
        marks = []
        used = 0
        for part in parts:
            marks.append(fixed.get(part.name) or patterns[used % len(patterns)])
            used += part.name not in fixed
        return marks

    def _bar(
        self, parts: tuple[BarSegment, ...], marks: list[str], total: int, width: int
    ) -> RenderResult:
        from rich.text import Text

        end = f" {format_gib(total)}"
        fits_on_line = width - len(end) >= BAR_CELLS // 3
        room = min(BAR_CELLS, width - len(end) if fits_on_line else width)
        line = Text(no_wrap=True)
        if self.ascii_only:  # a rest drawn as blanks needs an edge
            room -= 2
            line.append("|")
        for part, mark, count in zip(parts, marks, cells(parts, room), strict=True):
            line.append(mark * count, style=part.color[0])
        if self.ascii_only:
            line.append("|")
        yield line.append(end) if fits_on_line else line
        if not fits_on_line:
            yield Text(end.strip())

    def _legend(
        self, parts: tuple[BarSegment, ...], marks: list[str], rows: list[Row], width: int
    ) -> RenderResult:
        """Yield the legend in as many columns as fit; a table has one part on each line."""
        from rich.text import Text

        names = max((len(row[0]) for row in rows), default=0)
        sizes = max((len(row[1]) for row in rows), default=0)
        shares = max((len(row[2]) for row in rows), default=0)
        item = 2 + names + 1 + sizes + (1 + shares if shares else 0)
        if self.table:
            columns = 1
        else:
            columns = max(1, (width + 2 * _GAP) // (item + 2 * _GAP))
        line = Text()
        for i, (part, mark, (name, size, share)) in enumerate(zip(parts, marks, rows, strict=True)):
            if i and i % columns == 0:
                yield line
                line = Text()
            line.append(" " * 2 * _GAP if i % columns else "").append(mark, style=part.color[0])
            if item <= width:
                line.append(
                    f" {name:<{names}} {size:>{sizes}}" + (f" {share:>{shares}}" if shares else "")
                )
            else:  # too narrow for columns, so the line may wrap
                line.append(f" {name} {size} {share}".rstrip())
            if self.table and part.source and item + len(part.source) + _GAP <= width:
                line.append(f"  {part.source}", style="dim")
        if line:
            yield line


def _row(segment: BarSegment, *, shares: bool) -> Row:
    return segment.name, format_gib(segment.bytes), percent(segment.ratio) if shares else ""


SHOWN_EVIDENCE: Final = 1
EVIDENCE_CHARS: Final = 160
MAX_COLUMNS: Final = 100

Commands = Mapping[str, str]


def print_diagnosis(
    console: Console, diagnosis: Diagnosis, commands: Commands | None = None
) -> None:
    """Print every incident; without incidents, one line and a panel for each start.

    Args:
        console: where to print; a console without Unicode gets ASCII.
        diagnosis: the diagnosis.
        commands: the full patched command by setting, printed below the panel; None for none.
    """
    shown = drawn(diagnosis)
    with homes_kept():
        pasted = {setting: mask(plain(command)) for setting, command in (commands or {}).items()}
    if (console.encoding or "").lower().startswith("utf"):
        _print(console, shown, pasted, ascii_only=False)
        return
    with console.capture() as captured:
        _print(console, shown, pasted, ascii_only=True)
    # A log may contain any script; characters that the console cannot write are replaced.
    console.file.write(
        captured.get()
        .replace("…", "...")
        .encode(console.encoding, "replace")
        .decode(console.encoding)
    )


def _print(console: Console, diagnosis: Diagnosis, commands: Commands, *, ascii_only: bool) -> None:
    width = min(console.width, MAX_COLUMNS)
    for group in shown_once(diagnosis):
        console.print(panel(group, source=diagnosis.source, ascii_only=ascii_only), width=width)
        for what, command in _pasted(group, commands):
            # Outside the box and never wrapped, so that the user can copy the command.
            console.print(f"# {what}", style="dim", markup=False, soft_wrap=True)
            console.print(command, style="green", markup=False, soft_wrap=True)
    if not diagnosis.incidents:
        line = f"{diagnosis.source or 'text'}: {diagnosis.without_failure}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        for start in diagnosis.starts:
            console.print(start_panel(start, ascii_only=ascii_only), width=width)
    for device in diagnosis.snapshot.devices if diagnosis.snapshot else ():
        console.print(snapshot_panel(device, ascii_only=ascii_only), width=width)
    for note in diagnosis.notes:
        if note != EMPTY:
            console.print(f"note: {note}", markup=False, highlight=False)


def _pasted(group: ShownIncident, commands: Commands) -> list[tuple[str, str]]:
    """Return (description, full command) of every patch and alternative with a command."""
    patches = [
        (f"{p.setting} {p.new} [{p.effect}]", commands.get(p.setting)) for p in group.incident.plan
    ]
    others = [
        (f"or {a.setting} {a.new}: {a.why_not}", commands.get(f"alternative:{a.setting}"))
        for a in group.incident.alternatives
    ]
    return [(what, command) for what, command in [*patches, *others] if command is not None]


def panel(shown: ShownIncident, *, source: str = "", ascii_only: bool = False) -> RenderableType:
    """Return one incident as a panel; its texts must be printable (``drawn``)."""
    from rich.text import Text

    incident = shown.incident
    parts: list[RenderableType] = [Text(incident.headline, style="bold")]
    parts += [Text(text, style="dim") for text in (place(incident, source), echoes(shown)) if text]
    if incident.actions:
        parts += [Text(), _action("Do first: ", incident.actions[0])]
    for number, cause in enumerate(shown_causes(incident)):
        parts += _cause(cause, first=number == 0)
    if how := decide_by(incident):
        parts.append(Text("Decide by: ", style="bold").append(how, style="not bold"))
    if incident.budget.parts:
        parts += [Text(), BudgetBar(incident.budget, ascii_only=ascii_only)]
    if text := contradiction(incident.budget):
        parts.append(Text(text, style="yellow"))
    if len(incident.actions) > 1:
        parts.append(Text("\nIf that is not enough", style="bold"))
        parts += [
            _action(f"{number}. ", action) for number, action in enumerate(incident.actions[1:], 2)
        ]
    if ruled_out := ruled_out_changes(incident):
        parts.append(
            Text("\nNot changed: ", style="bold").append("; ".join(ruled_out), style="not bold")
        )
    if incident.alternatives:
        parts.append(Text("\nInstead", style="bold"))
        parts += [_alternative(alternative) for alternative in incident.alternatives]
    if incident.unknown:
        parts.append(
            Text("\nUnknown: ", style="bold").append(
                " ".join(incident.unknown), style="not bold dim"
            )
        )
    if incident.missing:
        parts.append(
            Text("\nTo decide: ", style="bold").append(incident.missing.what, style="not bold")
        )
        parts.append(Text(f"  {incident.missing.command}", style="cyan"))
    return _boxed(
        parts, incident.kind, "red" if incident.is_oom else "yellow", ascii_only=ascii_only
    )


def start_panel(start: EngineStart, *, ascii_only: bool = False) -> RenderableType:
    """Return one engine start as a panel: settings, memory and capacity."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if settings := settings_of_note(start):
        line = Text()
        for i, (name, value) in enumerate(settings):
            line.append(f"{', ' if i else ''}{name} ", style="dim").append(value)
        parts.append(line)
    if start.budget.parts:
        parts += [
            *([Text()] if parts else []),
            BudgetBar(start.budget, ascii_only=ascii_only, table=True),
        ]
    if text := contradiction(start.budget):
        parts.append(Text(text, style="yellow"))
    if text := capacity(start):
        parts += [*([Text()] if parts else []), Text(text, style="bold")]
    if not parts:
        parts.append(Text("the log shows no settings and no memory figures", style="dim"))
    return _boxed(parts, start_title(start), "green", ascii_only=ascii_only)


def _boxed(
    parts: list[RenderableType], title: str, style: str, *, ascii_only: bool
) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    if ascii_only:
        frame = box.ASCII
    else:
        frame = box.ROUNDED
    return Panel(
        Group(*parts), title=Text(title), title_align="left", border_style=style, box=frame
    )


def _cause(cause: Cause, *, first: bool) -> list[RenderableType]:
    from rich.text import Text

    title = Text(f"\n{'Why' if first else 'Or'}: {cause.title} ", style="bold")
    title.append(
        f"({cause.id}, {confidence(cause.confidence)}, {cause.rule or 'no rule'})",
        style="not bold dim",
    )
    lines: list[RenderableType] = [title, Text(cause.explanation)]
    if first:
        printed = [e for e in cause.evidence if e.line is not None]
    else:
        printed = []
    return lines + [_indented(_short(str(e)), 2, "dim") for e in printed[:SHOWN_EVIDENCE]]


def _short(text: str) -> str:
    if len(text) <= EVIDENCE_CHARS:
        return text
    return f"{text[: EVIDENCE_CHARS - 3].rstrip()}..."


def _action(start: str, action: Action) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    is_first = not start[0].isdigit()
    first = Text(start, style="bold").append(action.title, style="bold" if is_first else "not bold")
    if action.effect is not None:
        first.append(f"  [{action.effect}]", style="not bold dim")
    lines: list[RenderableType] = [_indented(text, 3) for text in [action_why(action)] if text]
    if action.command:
        lines.append(_indented(action.command, 3, "green"))
    if action.cost:
        lines.append(_indented(f"Cost: {action.cost}", 3, "dim"))
    if action.blocked_by:
        lines.append(_indented(f"Not automatic: {action.blocked_by}", 3, "yellow"))
    return Padding(Group(first, *lines), (0, 0, 0, 0 if is_first else 2))


def _alternative(alternative: Alternative) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    first = Text(f"{instead(alternative)} ({alternative.why_not})")
    lines: list[RenderableType] = []
    if cost := tradeoff(alternative):
        lines.append(_indented(f"Cost: {cost}", 3, "dim"))
    if paste := pastes(alternative):
        lines.append(_indented(" or ".join(paste), 3, "green"))
    return Padding(Group(first, *lines), (0, 0, 0, 2))


def _indented(text: str, columns: int, style: str = "") -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style), (0, 0, 0, columns))
