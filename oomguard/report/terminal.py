"""The panel a person reads: what happened, where the bytes went, why, what to paste, what is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from oomguard.escapes import strip_escapes
from oomguard.facts import format_gib
from oomguard.incident import Budget, Diagnosis, Incident, Patch
from oomguard.report.headline import headline
from oomguard.report.mask import mask

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BAR_CELLS: Final = 50
SHOWN_CAUSES: Final = 2
SHOWN_EVIDENCE: Final = 2
EVIDENCE_CHARS: Final = 240
MAX_COLUMNS: Final = 100
_BAR_STYLES: Final = ("red", "yellow", "magenta", "cyan", "blue", "green")

Commands = Mapping[str, str]


def print_diagnosis(console: Console, diagnosis: Diagnosis, commands: Commands | None = None) -> None:
    """Print every incident of a diagnosis, or one line that says there is none.

    ``commands`` maps a setting to the full command with its patch applied; they are printed below the panel.
    """
    if (console.encoding or "").lower().startswith("utf"):
        _print(console, diagnosis, commands or {}, ascii_only=False)
        return
    with console.capture() as captured:
        _print(console, diagnosis, commands or {}, ascii_only=True)
    # A log may hold any script; what the console cannot write is replaced, not raised over.
    console.file.write(captured.get().replace("…", "...").encode(console.encoding, "replace").decode(console.encoding))


def _print(console: Console, diagnosis: Diagnosis, commands: Commands, *, ascii_only: bool) -> None:
    source = strip_escapes(diagnosis.source)
    if not diagnosis.incidents:
        console.print(f"{source or 'text'}: no memory failure found", markup=False, highlight=False, soft_wrap=True)
    for incident in diagnosis.incidents:
        console.print(panel(incident, source=source, ascii_only=ascii_only), width=min(console.width, MAX_COLUMNS))
        for what, command in _pasted(incident, commands):
            # Outside the box and never wrapped: a command is there to be copied.
            console.print(f"# {what}", style="dim", markup=False, soft_wrap=True)
            console.print(mask(command), style="green", markup=False, soft_wrap=True)
    for note in diagnosis.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _pasted(incident: Incident, commands: Commands) -> list[tuple[str, str]]:
    """(what it does, the full command) of every patch and alternative that has one."""
    patches = [(f"{p.setting} {p.new} [{p.effect}]", commands.get(p.setting)) for p in incident.plan]
    others = [
        (f"or {a.setting} {a.new}: {a.why_not}", commands.get(f"alternative:{a.setting}"))
        for a in incident.alternatives
    ]
    return [(what, command) for what, command in [*patches, *others] if command is not None]


def panel(incident: Incident, *, source: str = "", ascii_only: bool = False) -> RenderableType:
    """One incident as a panel."""
    from rich import box
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(incident), style="bold")]
    parts.append(Text(_where(incident, source), style="dim"))
    if len(incident.budget.parts) > 0 and incident.budget.device_total_bytes:
        parts += [Text(), *_bar(incident.budget, ascii_only=ascii_only)]
    for cause in incident.causes[:SHOWN_CAUSES]:
        label = "Why" if cause is incident.causes[0] else "Or"
        title = Text(f"\n{label}: ", style="bold").append(f"{cause.title} ", style="bold")
        title.append(f"({cause.id}, confidence {cause.confidence:.2f}, {cause.rule or 'no rule'})", style="dim")
        parts += [title, Text(mask(cause.explanation))]
        if cause is incident.causes[0]:
            printed = [e for e in cause.evidence if e.line is not None][:SHOWN_EVIDENCE]
            parts += [Padding(Text(_short(mask(str(e))), style="dim"), (0, 0, 0, 2)) for e in printed]
    if incident.plan:
        parts.append(Text("\nWhat to change", style="bold"))
        parts += [_patch(number, patch) for number, patch in enumerate(incident.plan, 1)]
    if incident.alternatives:
        parts.append(Text("\nInstead", style="bold"))
        for alternative in incident.alternatives:
            paste = alternative.as_flag or alternative.as_kwarg or ""
            parts.append(
                Text(f"  {alternative.setting} = {alternative.new} ({alternative.why_not}, never raised by itself)")
            )
            if paste:
                parts.append(Padding(Text(mask(paste), style="green"), (0, 0, 0, 5)))
    if incident.unknown:
        parts.append(Text("\nUnknown: ", style="bold").append("; ".join(incident.unknown), style="dim"))
    seen = f" (seen {incident.repeated} times)" if incident.repeated > 1 else ""
    return Panel(
        Group(*parts),
        title=f"{incident.kind}{seen}",
        title_align="left",
        border_style="red",
        box=box.ASCII if ascii_only else box.ROUNDED,
    )


def _short(text: str) -> str:
    return text if len(text) <= EVIDENCE_CHARS else f"{text[: EVIDENCE_CHARS - 1].rstrip()}…"


def _where(incident: Incident, source: str) -> str:
    version = f" {incident.framework_version}" if incident.framework_version else ""
    place = [f"{incident.framework}{version}", incident.phase.replace("_", " ")]
    if incident.location.process:
        place.append(incident.location.process)
    if incident.location.line is not None:
        place.append(f"{source + ' ' if source else ''}line {incident.location.line}")
    return ", ".join(place)


def _bar(budget: Budget, *, ascii_only: bool) -> list[RenderableType]:
    from rich.text import Text

    total = budget.device_total_bytes or 1
    bar, legend = Text(), Text()
    used = 0
    marks = "#=+*o%" if ascii_only else "██████"
    for i, part in enumerate(budget.parts):
        cells = min(BAR_CELLS - used, max(1, round(BAR_CELLS * part.bytes / total)))
        style = "dim" if part.name == "free" else _BAR_STYLES[i % len(_BAR_STYLES)]
        glyph = ("." if ascii_only else "░") if part.name == "free" else marks[i % len(marks)]
        bar.append(glyph * max(0, cells), style=style)
        used += max(0, cells)
        legend.append(f"{glyph} ", style=style).append(f"{part.name} {format_gib(part.bytes)}  ")
    bar.append(("-" if ascii_only else "·") * max(0, BAR_CELLS - used), style="dim")
    return [bar.append(f" {format_gib(total)}"), legend]


def _patch(number: int, patch: Patch) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    old = "" if patch.old is None else f"{patch.old} -> "
    new = "not solved" if patch.new is None else str(patch.new)
    first = Text(f"{number}. {patch.setting}: {old}{new}", style="bold" if patch.applicable else "")
    first.append(f"  [{patch.effect}]", style="dim")
    freed = patch.predicted_freed_bytes or 0
    lines = [Text(patch.reason + (f" (frees {format_gib(freed)})" if freed > 0 else ""))]
    if patch.tradeoff:
        lines.append(Text(f"Cost: {patch.tradeoff}", style="dim"))
    if patch.new is not None and patch.blocked_by:
        lines.append(Text(f"Not done by itself: {patch.blocked_by}", style="yellow"))
    paste = " or ".join(p for p in (patch.as_flag, patch.as_kwarg, patch.as_env) if p)
    if patch.new is not None and paste:
        lines.append(Text(mask(paste), style="green"))
    return Padding(Group(first, Padding(Group(*lines), (0, 0, 0, 3))), (0, 0, 0, 2))
