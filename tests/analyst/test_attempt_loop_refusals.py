"""Why a rank cannot run its command again, as it tells the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.analyst.attempt_loop import refusal_of
from oomguard.cluster.ranks.decision import decide
from oomguard.cluster.ranks.messages import RankEnd
from oomguard.remedy.policy import Policy
from oomguard.retry import Ledger

PATCH = (
    {
        "setting": "max_model_len",
        "from": 32768,
        "to": 1792,
        "effect": "reduces-capacity",
        "reason": "",
    },
)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(deadline_s=1e-9), "its --deadline has passed"),
        (Policy(max_attempts=1), "the limit of attempts is reached"),
        (Policy(max_attempts=1, deadline_s=1e-9), "the limit of attempts is reached"),
    ],
    ids=["deadline", "relaunches", "both"],
)
def test_rank_policy_is_reported_by_name_and_may_change_later(
    policy: Policy, why: str, tmp_path: Path
):
    refusal = refusal_of(1, Ledger(policy), None, tmp_path / "f", dry_run=False)
    assert refusal == why
    ends = {
        0: RankEnd(1, "ended", 143),
        1: RankEnd(1, "memory", 1, "exit status 1", {}, PATCH, refusal),
    }
    decision = decide(1, ends, {})
    assert (decision.why, decision.is_exhausted) == (f"rank 1: {why}", True)
