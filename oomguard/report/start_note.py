"""The note that the exception of a failed start carries: the diagnosis, and the process of the engine that it happened in."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard.facts import format_gib
from oomguard.incident import Attempt, Incident
from oomguard.report.note import note
from oomguard.report.presentable import drawn
from oomguard.report.wording import engine


def start_note(incident: Incident, attempts: Sequence[Attempt] = ()) -> str:
    """Return the diagnosis as ``note`` has it, with where it happened and where the bytes went behind what happened and why."""
    lines = note(incident, attempts).split("\n")
    told = drawn(incident)
    behind = 2 if told.causes else 1
    phase = "" if told.phase == "unknown" else told.phase.replace("_", " ")
    where = ", ".join(text for text in (engine(told), phase, told.location.process) if text)
    more = [f"  where: {where}"] if where else []
    more += [f"  budget: {text}" for text in [_budget(told)] if text]
    return "\n".join([*lines[:behind], *more, *lines[behind:]])


def _budget(incident: Incident) -> str:
    """Return where the device's bytes went, as far as is known; "" where nothing of it is."""
    parts = [f"{part.name.replace('_', ' ')} {format_gib(part.bytes)}" for part in incident.budget.parts]
    total = incident.budget.device_total_bytes
    if not parts:
        return ""
    return f"{', '.join(parts)}{'' if total is None else f' of {format_gib(total)}'}"
