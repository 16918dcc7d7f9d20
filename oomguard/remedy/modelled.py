"""What the planner asks where no printed number gives a value: the model behind the failure.

A failed start of an engine and a failed call answer alike. A remedy is a fix of a rule; where only the model can compute its
value, that is a row in the model's table (``memory/vllm/fitting.py``, ``modelled_call.py``), and the planner stays as it is.
"""

from __future__ import annotations

from typing import Final, Protocol

from oomguard.incident import Alternative, Incident, Patch
from oomguard.remedy.policy import Policy
from oomguard.remedy.solution import Solution

# What a rule file writes after ``solve`` for a value that only the model behind the failure has.
MODELLED: Final = frozenset({"rows_that_fit"})


class FailureModel(Protocol):
    """What failed, as far as it can be computed: which values of its settings fit."""

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of one setting with which it fits; None where this model does not solve that setting."""

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return patches of one group that are enough together; empty where nothing helps."""

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what else would make it fit where no setting does: a larger device, more of them."""
