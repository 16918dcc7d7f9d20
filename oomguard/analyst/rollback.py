"""Take back our own change that refused a request, and plan anew for the failure before it with
what the request needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from oomguard.core.incident import Diagnosis
from oomguard.core.log import get_logger
from oomguard.remedy.policy import Need, with_needed
from oomguard.retry.ledger import Ledger

if TYPE_CHECKING:
    from oomguard.rules.rule_files import RuleSet


def take_back(ledger: Ledger, needed: Mapping[str, Need], rules: RuleSet) -> Diagnosis:
    """Take the settings back that were too small for a request, and return the last failure with
    another plan.

    Args:
        ledger: of the run; its policy holds what the request needs from here on.
        needed: what was refused, by setting.
        rules: what explains a failure.
    """
    if (
        ledger.diagnosis is None
    ):  # it did not come after a failure: an earlier run's change was reused
        for patch in ledger.patches:
            if patch.setting in needed:
                told = {
                    "setting": patch.setting,
                    "changed_to": patch.new,
                    "why_changed": patch.reason,
                }
                get_logger().warning(
                    "what was reused refused a request: run it without --reuse, or forget it",
                    **told,
                )
        return Diagnosis("")
    before = ledger.diagnosis
    for name, need in needed.items():
        if math.isinf(need.value):
            told = {}
        else:
            told = {"needed": f"{need.value:.0f}"}
        changed = {"setting": name, "changed_to": ledger.settings.pop(name), **told}
        get_logger().warning("our own change refused a request: it is taken back", **changed)
    ledger.policy = with_needed(ledger.policy, needed)
    failed = (before.first_cause,) if before.first_cause is not None else ()
    return ledger.diagnose(
        Diagnosis("", failed, before.notes, before.starts), rules, local_models=True
    )
