"""A diagnosis in a few plain lines: the note that a re-raised exception carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.core.incident import Action, Attempt, Incident
from oomguard.report.presentable import drawn
from oomguard.report.wording import action_why, engine, left_alone

# Facts that a guard measures of a call: it has tried each change that could help.
_MEASURED: Final = "prompt_tokens"


def note_in_guard(
    incident: Incident, attempts: Sequence[Attempt] = (), why_whole: str | None = None
) -> str:
    """Return the note of a failure that leaves a guard.

    A measured call lists only changes with a value, because the guard has tried the others. If the
    call was not run in parts, the line to write comes first.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that the guard made.
        why_whole: why the call was not run in parts, and what to write instead.
    """
    actions = incident.actions
    if _MEASURED in incident.facts:
        actions = tuple(one for one in actions if one.applicability != "needs-value")
    if why_whole is not None:
        actions = tuple(one for one in actions if one.id != "batch_size")
    named = [_named_argument(one) for one in actions if one.id == "wrap_in_guard"]
    others = [one for one in actions if one.id != "wrap_in_guard"]
    return note(replace(incident, actions=(*named, *others)), attempts, first=why_whole)


def _named_argument(action: Action) -> Action:
    """Return the advice to use a guard for a function that has one already."""
    title = "Name the argument that has one entry a row"
    return replace(action, title=title)


def note(
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    *,
    of_command: bool = False,
    first: str | None = None,
) -> str:
    """Return what happened, why, what was tried, what to change and what is unknown, one thing a
    line.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that were made.
        of_command: spell a change as its flag, not as a keyword argument.
        first: why a call was not run in parts, and what to write instead; shown before the actions.
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
    if first is not None:
        lines.append(f"  not run in parts: {first}")
    has_line_to_write = first is not None and "@oomguard.guard(" in first
    for number, action in enumerate(incident.actions):
        if number == 0 and not has_line_to_write:
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
    lines += [f"  not changed: {text}" for text in left_alone(incident)]
    if incident.unknown:
        lines.append(f"  unknown: {' '.join(incident.unknown)}")
    if incident.missing:
        lines.append(f"  to decide: {incident.missing.what}: {incident.missing.command}")
    return "\n".join(lines)


def _command(action: Action, incident: Incident, *, of_command: bool) -> str | None:
    """Return what to paste: the flag for a command, the keyword argument for a call."""
    patch = next((p for p in incident.plan if p.setting == action.id and p.new == action.new), None)
    if of_command or patch is None:
        return action.command
    return patch.as_kwarg or action.command


def tried(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each attempt that changed something: what, and what came of it."""
    return [
        f"  tried: {', '.join(f'{p.setting} {p.old} -> {p.new}' for p in attempt.patches)}: "
        f"{attempt.error or 'ran'}"
        for attempt in attempts
        if attempt.patches
    ]


# The note that the exception of a failed start carries: the diagnosis, and the process of the
# engine that it happened in.


def start_note(incident: Incident, attempts: Sequence[Attempt] = ()) -> str:
    """Return the diagnosis as ``note`` has it, with where it happened and where the bytes went
    behind what happened and why.
    """
    lines = note(incident, attempts).split("\n")
    told = drawn(incident)
    if told.causes:
        behind = 2
    else:
        behind = 1
    if told.phase == "unknown":
        phase = ""
    else:
        phase = told.phase.replace("_", " ")
    where = ", ".join(text for text in (engine(told), phase, told.location.process) if text)
    if where:
        more = [f"  where: {where}"]
    else:
        more = []
    more += [f"  budget: {text}" for text in [_budget(told)] if text]
    return "\n".join([*lines[:behind], *more, *lines[behind:]])


def _budget(incident: Incident) -> str:
    """Return where the device's bytes went, as far as is known; "" where nothing of it is."""
    parts = [
        f"{part.name.replace('_', ' ')} {format_gib(part.bytes)}" for part in incident.budget.parts
    ]
    total = incident.budget.device_total_bytes
    if not parts:
        return ""
    return f"{', '.join(parts)}{'' if total is None else f' of {format_gib(total)}'}"
