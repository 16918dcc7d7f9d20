"""Which model's files a diagnosis reads: those that the user gives, else the folder that the log names."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from oomguard.incident import Incident

# Whose models the memory model reads.
_READ: Final = "vllm"
_CONFIG: Final = "config.json"


def named_folder(incident: Incident) -> str | None:
    """Return the model's folder that the log names, if it is here and can be read; a name on the hub is never looked up."""
    named = _named(incident)
    try:
        if named is not None and Path(named).is_absolute() and (Path(named) / _CONFIG).is_file():
            return named
    except (OSError, ValueError):  # a name too long, or a folder of another user
        return None
    return None


def note_on_model(incident: Incident, model: str | None) -> str | None:
    """Return a note on the model that was read: the log's folder, or one of another name than the log's; None for neither."""
    named = _named(incident)
    if model is None:
        return (
            None
            if named_folder(incident) is None
            else f"the model was read from the folder that the log names: {named}"
        )
    if named is None or _last(named) == _last(model):
        return None
    return f"the model that you gave was read, {model}; the log names another one, {named}"


def _named(incident: Incident) -> str | None:
    fact = incident.facts.get("model")
    return str(fact.value) if fact is not None and incident.framework == _READ else None


def _last(name: str) -> str:
    """Return the last part of a model's name or folder, as the hub and a cache of it write it."""
    return name.rstrip("/").removesuffix(f"/{_CONFIG}").rpartition("/")[2].rpartition("--")[2].lower()
