"""Which calibrations ``oomguard run`` learned by itself, and dropping them; those that a user gave (``plan --calibrate``) stay."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from oomguard.facts import format_gib
from oomguard.memory.vllm.calibration import Calibrations

# How the source of one ends that was learned before its session was kept beside it.
_BY_RUN: Final = "oomguard run on "


def learned(kept: Calibrations, sessions: Collection[str] | None, model: str | None) -> tuple[str, ...]:
    """Return the calibrations of these sessions (None: of any) or of a model, a line each."""
    return tuple(map(_words, (entry for entry in kept.entries() if _is_of(entry, sessions, model))))


def forget(kept: Calibrations, sessions: Collection[str] | None, model: str | None) -> None:
    """Drop what ``learned`` returns; raises InputError where the file cannot be written."""
    entries = kept.entries()
    left = [entry for entry in entries if not _is_of(entry, sessions, model)]
    if len(left) < len(entries):
        kept.write(left)


def _is_of(entry: dict[str, Any], sessions: Collection[str] | None, model: str | None) -> bool:
    if "session" not in entry and _BY_RUN not in entry["correction"]["source"]:
        return False
    if model is not None:
        named = str(entry.get("model", ""))
        return model in {named, str(Path(named).expanduser().resolve()) if named else ""}
    return sessions is None or entry.get("session") in sessions


def _words(entry: dict[str, Any]) -> str:
    of = entry["of"]
    where = f"{of.get('device') or 'a GPU'} of {format_gib(of['gpu_total_bytes'])}"
    return f"calibration of {entry.get('model') or 'a model'} on {where} by {entry['correction']['source']}"
