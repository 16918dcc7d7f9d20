"""An engine that a program started, as what runs inside it told it, and the changes that are meant
for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oomguard.core.facts import FactValue
from oomguard.core.incident import Incident
from oomguard.core.settings import value_in_force


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """One engine; the settings are by canonical name.

    Attributes:
        model: as the program named it.
        order: which of its process's engines it is, from 1.
        process: number of the process that started it.
        arguments: what the program gave it, None where that was not told.
        in_effect: what the engine made of it.
        changed: what was changed for us.
    """

    model: str | None
    order: int
    process: int
    arguments: Mapping[str, FactValue] | None = None
    in_effect: Mapping[str, FactValue] = field(default_factory=dict)
    changed: Mapping[str, FactValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChange:
    """Settings for the engines of one model, or for one of them; None: of any model, of
    any order.
    """

    model: str | None
    order: int | None
    settings: Mapping[str, FactValue]

    def reaches(self, model: str | None, order: int | None) -> bool:
        """Return whether an engine may be one that it is for."""
        same_model = self.model is None or model is None or self.model == model
        return same_model and (self.order is None or order is None or self.order == order)


def failed_model(incident: Incident) -> str | None:
    """Return the model of the engine that failed, as it printed it."""
    known = value_in_force("model", incident.settings, incident.facts)
    if known is not None and isinstance(known[0], str):
        return known[0]
    return None


def failed_engine(incident: Incident, started: Sequence[StartedEngine]) -> StartedEngine | None:
    """Return the engine that a failure is of; None where it is not known which.

    A start that failed is the last one. Of those that serve, only one of its model can be told.
    """
    model = failed_model(incident)
    if incident.is_at_start:
        last = started[-1:]
        if last and (model is None or last[0].model in {None, model}):
            return last[0]
        return None
    same = [engine for engine in started if model is None or engine.model in {None, model}]
    if len(same) == 1:
        return same[0]
    return None


def changes_with(
    changes: Sequence[EngineChange],
    incident: Incident,
    started: Sequence[StartedEngine],
    new: Mapping[str, FactValue],
) -> tuple[EngineChange, ...]:
    """Return the changes with new settings for the engine that failed; those of other engines stay
    theirs.
    """
    engine = failed_engine(incident, started)
    several = len(started) > 1 and len({engine.process for engine in started}) == 1
    model = failed_model(incident)
    order = engine.order if engine is not None and several else None
    same = next(
        (change for change in changes if (change.model, change.order) == (model, order)), None
    )
    if same is None:
        return (*changes, EngineChange(model, order, dict(new)))
    joined = EngineChange(model, order, {**same.settings, **new})
    return tuple(joined if change is same else change for change in changes)
