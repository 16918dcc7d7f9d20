"""Choose the exit status of a failed run by its cause, for schedulers."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomguard.core.incident import Incident

if TYPE_CHECKING:
    from oomguard.analyst.outcome import Outcome


def by_cause(outcome: Outcome) -> Outcome:
    """Return the outcome with the status of its cause, if that is memory or a hang.

    Otherwise the command's own status stays. It also stays if a permitted change is left, because
    another start may then succeed.
    """
    incident = outcome.attempts[-1].incident
    if incident is not None and incident.is_oom:
        if is_held(incident):
            name = "device_held"
        else:
            name = "out_of_memory"
        if name == "out_of_memory" and outcome.is_change_left:
            return outcome
    elif outcome.is_ended_by_us:
        name = "ended_by_oomguard"
    else:
        return outcome
    return replace(outcome, status=_table()["statuses"][name])


def is_held(incident: Incident) -> bool:
    """Return whether memory failed because of other processes, so that a later start may fit."""
    return incident.causes[0].id in _table()["causes"]["device_held"]


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("statuses.toml").read_text(encoding="utf-8"))
