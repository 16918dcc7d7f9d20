"""Show a diagnosis in a few plain lines: the note on a re-raised exception."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.core.facts import format_gib
from oomguard.core.incident import Action, Attempt, Incident
from oomguard.report.presentable import drawn
from oomguard.report.wording import action_why, engine, ruled_out_changes


def note(incident: Incident, attempts: Sequence[Attempt] = (), *, of_command: bool = False) -> str:
    """Return the note: failure, cause, attempts, actions and unknowns, one per line.

    Args:
        incident: the failure.
        attempts: the attempts before it.
        of_command: whether to spell a change as a flag instead of a keyword argument.
    """
    incident = drawn(incident)
    attempts = drawn(tuple(attempts))
    lines = [f"oomguard: {incident.headline}"]
    if incident.causes:
        cause = incident.causes[0]
        lines.append(
            f"  why: {cause.title} ({cause.id}, confidence {cause.confidence:.2f}). "
            f"{cause.explanation}"
        )
    lines += tried(attempts)
    for number, action in enumerate(incident.actions):
        if number == 0:
            start = "do first"
        else:
            start = "then"
        command = _command(action, incident, of_command=of_command)
        if action.blocked_by:
            blocked = f" [not automatic: {action.blocked_by}]"
        else:
            blocked = ""
        if action.effect is None:
            effect = ""
        else:
            effect = f" ({action.effect})"
        if command:
            pasted = f": {command}"
        else:
            pasted = ""
        lines.append(
            f"  {start}: {action.title}{effect}{pasted}. {action_why(action)}{blocked}".rstrip()
        )
    lines += [f"  not changed: {text}" for text in ruled_out_changes(incident)]
    if incident.unknown:
        lines.append(f"  unknown: {' '.join(incident.unknown)}")
    if incident.missing:
        lines.append(f"  to decide: {incident.missing.what}: {incident.missing.command}")
    return "\n".join(lines)


def _command(action: Action, incident: Incident, *, of_command: bool) -> str | None:
    """Return the text to paste: the flag of a command, or the keyword argument of a call."""
    patch = next((p for p in incident.plan if p.setting == action.id and p.new == action.new), None)
    if of_command or patch is None:
        return action.command
    return patch.as_kwarg or action.command


def tried(attempts: Sequence[Attempt]) -> list[str]:
    """Return one line for each attempt that changed something, with its result."""
    return [
        f"  tried: {', '.join(f'{p.setting} {p.old} -> {p.new}' for p in attempt.patches)}: "
        f"{attempt.error or 'ran'}"
        for attempt in attempts
        if attempt.patches
    ]


def start_note(incident: Incident, attempts: Sequence[Attempt] = ()) -> str:
    """Return the note on a failed engine start: ``note`` plus the process and the budget."""
    lines = note(incident, attempts).split("\n")
    shown = drawn(incident)
    if shown.causes:
        behind = 2
    else:
        behind = 1
    if shown.phase == "unknown":
        phase = ""
    else:
        phase = shown.phase.replace("_", " ")
    where = ", ".join(text for text in (engine(shown), phase, shown.location.process) if text)
    if where:
        more = [f"  where: {where}"]
    else:
        more = []
    more += [f"  budget: {text}" for text in [_budget(shown)] if text]
    return "\n".join([*lines[:behind], *more, *lines[behind:]])


def _budget(incident: Incident) -> str:
    """Return the known parts of the device's memory; "" if no part is known."""
    parts = [
        f"{part.name.replace('_', ' ')} {format_gib(part.bytes)}" for part in incident.budget.parts
    ]
    total = incident.budget.device_total_bytes
    if not parts:
        return ""
    return f"{', '.join(parts)}{'' if total is None else f' of {format_gib(total)}'}"
