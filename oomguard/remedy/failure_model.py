"""The model behind a failure: it solves values that no printed number gives.

A failed engine start and a failed call answer the same questions, so the planner treats them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from oomguard.core.incident import Alternative, Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution

# Names after ``solve`` in rule files for values that only the model behind a failure has.
MODELLED: Final = frozenset({"rows_that_fit", "sequences_for_warmup", "step_tokens_for_tried"})


class FailureModel(Protocol):
    """What failed, as far as it can be computed: which values of its settings fit."""

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of a setting with which it fits; None if it cannot be solved."""

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return one group of patches that is enough together; empty if nothing helps."""

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what helps if no setting does, such as a larger device or more devices."""


@dataclass(frozen=True, slots=True)
class ModelChain:
    """Several models behind one failure; the first with an answer counts."""

    models: tuple[FailureModel, ...]

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the first solved value of a setting, or the first reason for none."""
        found = [
            solution
            for model in self.models
            if (solution := model.solve(setting, incident)) is not None
        ]
        return next(
            (solution for solution in found if solution.value is not None), next(iter(found), None)
        )

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return the first group of patches."""
        groups = (model.solve_together(incident, policy) for model in self.models)
        return next((group for group in groups if group), ())

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what else each model would make fit."""
        return tuple(other for model in self.models for other in model.smallest_that_fits(incident))
