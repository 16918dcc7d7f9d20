"""Print a diagnosis: the panels of its failures, of its starts and of a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomguard.core.incident import EMPTY, Diagnosis, EngineStart
from oomguard.core.presentable import drawn, plain
from oomguard.core.redact import homes_kept, mask
from oomguard.report.bar import BudgetBar, contradiction, has_colors
from oomguard.report.panel import Commands, PanelOptions, panel, summary_lines
from oomguard.report.wording import (
    ShownIncident,
    capacity,
    settings_of_note,
    shown_once,
    start_title,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from oomguard.core.snapshot_records import Snapshot


MAX_COLUMNS: Final = 100


def print_diagnosis(
    console: Console,
    diagnosis: Diagnosis,
    commands: Commands | None = None,
    *,
    full: bool = False,
) -> None:
    """Print the failures; without any, one line and a panel for each start.

    Several failures begin with a summary, and only the first cause is printed in full.

    Args:
        console: where to print; a console without Unicode gets ASCII.
        diagnosis: the diagnosis.
        commands: the whole patched command by setting, if oomguard ran it; None otherwise.
        full: whether to print every failure, cause, option and unknown in full.
    """
    shown = drawn(diagnosis)
    with homes_kept():
        command = mask(plain(diagnosis.command))
        pasted = {setting: mask(plain(command)) for setting, command in (commands or {}).items()}
    is_unicode = (console.encoding or "").lower().startswith("utf")
    options = PanelOptions(
        min(console.width, MAX_COLUMNS),
        shown.source,
        full,
        pasted,
        command,
        is_run=commands is not None,
        colored=has_colors(console),
        ascii_only=not is_unicode,
    )
    if is_unicode:
        _print(console, shown, options)
        return
    with console.capture() as captured:
        _print(console, shown, options)
    # A log may contain any script; characters that the console cannot write are replaced.
    console.file.write(
        captured.get()
        .replace("…", "...")
        .encode(console.encoding, "replace")
        .decode(console.encoding)
    )


def _print(console: Console, diagnosis: Diagnosis, options: PanelOptions) -> None:
    groups = _first_cause_first(diagnosis)
    if len(groups) > 1:
        for line in summary_lines(groups, options):
            console.print(line, soft_wrap=True)
    for number, group in enumerate(groups if options.full else groups[:1]):
        if number:
            console.print()
        for part in panel(group, options):
            console.print(part, soft_wrap=True, highlight=False)
    if not diagnosis.incidents:
        healthy = f"{diagnosis.source or 'text'}: {diagnosis.without_failure}"
        console.print(healthy, markup=False, highlight=False, soft_wrap=True)
        for start in diagnosis.starts:
            console.print(start_panel(start, ascii_only=options.ascii_only), width=options.width)
    if diagnosis.snapshot is not None:
        _print_snapshot(console, diagnosis.snapshot, options)
    for note in diagnosis.notes:
        if note != EMPTY:
            console.print(f"note: {note}", markup=False, highlight=False)


def _print_snapshot(console: Console, snapshot: Snapshot, options: PanelOptions) -> None:
    from oomguard.report.snapshot import snapshot_panel

    for device in snapshot.devices:
        console.print(snapshot_panel(device, ascii_only=options.ascii_only), width=options.width)


def _first_cause_first(diagnosis: Diagnosis) -> list[ShownIncident]:
    """Return the failures, the one to act on first."""
    groups = shown_once(diagnosis)
    first = diagnosis.first_cause
    return sorted(groups, key=lambda group: group.incident is not first)


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
