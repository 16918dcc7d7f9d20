"""A diagnosis in a few plain lines: the note that a re-raised exception carries."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.facts import format_gib
from oomguard.incident import Attempt, Incident
from oomguard.report.presentable import drawn
from oomguard.report.wording import blocked, engine


def note(incident: Incident, attempts: Sequence[Attempt] = ()) -> str:
    """Return what happened, why, what was tried, what to change and what is unknown, one thing a line."""
    incident, attempts = drawn(incident), drawn(tuple(attempts))
    lines = [f"oomguard: {incident.headline}"]
    if incident.causes:
        cause = incident.causes[0]
        lines.append(f"  why: {cause.title} ({cause.id}, confidence {cause.confidence:.2f}). {cause.explanation}")
    if incident.location.process is not None:
        phase = "" if incident.phase == "unknown" else incident.phase.replace("_", " ")
        where = (engine(incident), phase, incident.location.process)
        lines.append(f"  where: {', '.join(text for text in where if text)}")
        lines += [f"  budget: {text}" for text in [_budget(incident)] if text]
    lines += [
        f"  tried: {', '.join(f'{p.setting} {p.old} -> {p.new}' for p in attempt.patches)}: {attempt.error or 'ran'}"
        for attempt in attempts
        if attempt.patches
    ]
    for patch in incident.plan:
        to = "not solved" if patch.new is None else patch.as_kwarg or patch.as_flag or f"{patch.setting}={patch.new}"
        why = f" [not done by itself: {blocked(patch)}]" if blocked(patch) else ""
        lines.append(f"  change: {patch.setting}: {to} ({patch.effect}): {patch.reason}{why}")
    if incident.unknown:
        lines.append(f"  unknown: {'; '.join(incident.unknown)}")
    return "\n".join(lines)


def _budget(incident: Incident) -> str:
    """Return where the device's bytes went, as far as is known; "" where nothing of it is."""
    parts = [f"{part.name.replace('_', ' ')} {format_gib(part.bytes)}" for part in incident.budget.parts]
    total = incident.budget.device_total_bytes
    if not parts:
        return ""
    return f"{', '.join(parts)}{'' if total is None else f' of {format_gib(total)}'}"
