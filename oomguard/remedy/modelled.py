"""What the planner asks where no printed number gives a value: the model behind the failure.

A failed start of an engine and a failed call answer alike. A remedy is a fix of a rule; where only the model can compute its
value, that is a row in the model's table (``memory/vllm/fitting.py``, ``modelled_call.py``), and the planner stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from oomguard.incident import Alternative, Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution

# What a rule file writes after ``solve`` for a value that only the model behind the failure has.
MODELLED: Final = frozenset({"rows_that_fit", "sequences_for_warmup", "step_tokens_for_tried"})


class FailureModel(Protocol):
    """What failed, as far as it can be computed: which values of its settings fit."""

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which it fits; None where this model does not solve that setting."""

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return patches of one group that are enough together; empty where nothing helps."""

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what else would make it fit where no setting does: a larger device, more of them."""


@dataclass(frozen=True, slots=True)
class Models:
    """Several models behind one failure: the first that has an answer gives it."""

    models: tuple[FailureModel, ...]

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the first value that one of them solves, else the first reason why none was found."""
        found = [solution for model in self.models if (solution := model.solve(setting, incident)) is not None]
        return next((solution for solution in found if solution.value is not None), next(iter(found), None))

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return the first group that one of them has."""
        groups = (model.solve_together(incident, policy) for model in self.models)
        return next((group for group in groups if group), ())

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what else would make it fit, by each of them."""
        return tuple(other for model in self.models for other in model.smallest_that_fits(incident))
