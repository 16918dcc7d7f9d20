"""Show a diagnosis in a few plain lines: the note on a re-raised exception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from oomguard.core.facts import format_gib
from oomguard.core.incident import Action, Attempt, Incident
from oomguard.report.phrases import action_why, engine, ruled_out_changes
from oomguard.report.presentable import drawn

# A fact that only a guard measures, after it has tried every change that could help.
_MEASURED: Final = "prompt_tokens"


def note_in_guard(
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    why_whole: str | None = None,
    why_not_joined: str | None = None,
) -> str:
    """Return the note of a failure that leaves a guard.

    In a measured call, a change without a value cannot help, and one short line says why. If the
    call was not run in parts, the line to write comes first.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that the guard made.
        why_whole: why the call was not run in parts, and what to write instead.
        why_not_joined: why the results of the parts cannot be joined, and what to write instead. It
            replaces the cause and the actions, because each part fits.
    """
    if why_not_joined is not None:
        lines = [f"oomguard: {drawn(incident).headline}", *tried(drawn(tuple(attempts)))]
        return "\n".join([*lines, f"  why: {why_not_joined}"])
    actions = incident.actions
    has_one_row = incident.number("batch_size") == 1
    if why_whole is not None or has_one_row:
        actions = tuple(one for one in actions if one.id != "batch_size")
    useless: list[str] = []
    if _MEASURED in incident.facts:
        useless = [_why_useless(one) for one in actions if one.applicability == "needs-value"]
        actions = tuple(one for one in actions if one.applicability != "needs-value")
    named = [_named_argument(one) for one in actions if one.id == "wrap_in_guard"]
    others = [one for one in actions if one.id != "wrap_in_guard"]
    text = note(replace(incident, actions=(*named, *others)), attempts, first=why_whole)
    return "\n".join([text, *useless])


def _why_useless(action: Action) -> str:
    """Return a line that says why a change cannot help: the reason follows the lever's text."""
    reason = action.why.partition("; ")[2] or action.why
    return f"  cannot help: {action.id}: {reason}"


def _named_argument(action: Action) -> Action:
    """Return the advice to use a guard for a function that has one already."""
    if "batch=" not in (action.command or ""):
        return action
    return replace(action, title="Name the argument that has one entry a row")


def note(
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    *,
    of_command: bool = False,
    first: str | None = None,
) -> str:
    """Return the note: failure, cause, attempts, actions and unknowns, one per line.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that were made.
        of_command: whether to spell a change as a flag instead of a keyword argument.
        first: why a call was not split, and what to write instead; None for no such line.
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
