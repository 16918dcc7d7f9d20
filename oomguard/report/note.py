"""A diagnosis in a few plain lines: the note that a re-raised exception carries."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.incident import Attempt, Incident
from oomguard.report.presentable import drawn
from oomguard.report.wording import blocked


def note(incident: Incident, attempts: Sequence[Attempt] = (), *, of_command: bool = False) -> str:
    """Return what happened, why, what was tried, what to change and what is unknown, one thing a line.

    ``of_command``: a change is spelled as its flag.
    """
    incident, attempts = drawn(incident), drawn(tuple(attempts))
    lines = [f"oomguard: {incident.headline}"]
    if incident.causes:
        cause = incident.causes[0]
        lines.append(f"  why: {cause.title} ({cause.id}, confidence {cause.confidence:.2f}). {cause.explanation}")
    lines += tried(attempts)
    for patch in incident.plan:
        spelled = patch.as_flag if of_command else patch.as_kwarg or patch.as_flag
        to = "not solved" if patch.new is None else spelled or f"{patch.setting}={patch.new}"
        why = f" [not done by itself: {blocked(patch)}]" if blocked(patch) else ""
        lines.append(f"  change: {patch.setting}: {to} ({patch.effect}): {patch.reason}{why}")
    if incident.unknown:
        lines.append(f"  unknown: {' '.join(incident.unknown)}")
    if incident.missing:
        lines.append(f"  to decide: {incident.missing.what}: {incident.missing.command}")
    return "\n".join(lines)


def tried(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each attempt that changed something: what, and what came of it."""
    return [
        f"  tried: {', '.join(f'{p.setting} {p.old} -> {p.new}' for p in attempt.patches)}: {attempt.error or 'ran'}"
        for attempt in attempts
        if attempt.patches
    ]
