"""What one rank's user says or one rank's oomguard writes: pins and floors hold for all, files of an oomguard hold nobody back."""

from __future__ import annotations

from oomguard.analyst.side_effects import SideEffects
from oomguard.cluster.ranks.decision import decide, is_change_left, policy_row, side_effects_row
from oomguard.cluster.ranks.messages import RankEnd, RankMessage, parse_message
from oomguard.core.incident import Effect
from oomguard.remedy.policy import LeastValue, Policy
from support.each import each

PATCH = (
    {
        "setting": "max_model_len",
        "from": 32768,
        "to": 1792,
        "effect": "reduces-capacity",
        "reason": "",
    },
)
FAILED = RankEnd(1, "memory", 1, "exit status 1", {}, PATCH)
WROTE = side_effects_row(SideEffects(changed_files=("/w/m.prom",)))


@each(
    ("policy", "why"),
    [
        (Policy(pinned=frozenset({"max_model_len"})), "pinned"),
        (Policy(minimum={"max_model_len": 16384}), "below your floor of 16384"),
        (
            Policy(allow=Effect.OUTPUT_PRESERVING),
            "--allow output-preserving does not permit reduces-capacity",
        ),
        (
            Policy(needed={"max_model_len": LeastValue(float("inf"), "it asks for")}),
            "below what it asks for",
        ),
    ],
)
def test_one_rank_without_permission_stops_all_and_is_named(policy, why):
    held = parse_message(
        RankMessage(2, "n", end=RankEnd(1, "ended", 143, policy=policy_row(policy))).to_text()
    )
    decision = decide(1, {0: RankEnd(1, "ended", 143), 1: FAILED, 2: held.end}, {})
    assert (decision.again, decision.why) == (
        False,
        f"rank 2: max_model_len 32768 -> 1792 is not permitted: {why}",
    )


def test_setting_of_the_user_on_any_rank_is_not_reduced():
    """The rank that failed may be a headless one, whose command line has none of the job's settings."""
    chosen = RankEnd(1, "ended", 143, policy=policy_row(Policy(), ["max_model_len"]))
    decision = decide(1, {0: chosen, 1: FAILED}, {})
    why = "rank 0: max_model_len 32768 -> 1792 is not permitted: you set it; --allow reduces-capacity permits it"
    assert (decision.again, decision.why) == (False, why)
    allowed = RankEnd(
        1, "ended", 143, policy=policy_row(Policy(allow=Effect.REDUCES_CAPACITY), ["max_model_len"])
    )
    other = RankEnd(1, "ended", 143, policy=policy_row(Policy(), ["max_num_seqs"]))
    assert decide(1, {0: allowed, 1: FAILED, 2: other}, {}).again


@each(
    ("of_rank_0", "silent", "left"),
    [
        (RankEnd(1, "ended", 143, refusal="a dry run"), (), True),
        (RankEnd(1, "ended", 143, seen=WROTE), (), True),
        (
            RankEnd(
                1, "ended", 143, policy=policy_row(Policy(pinned=frozenset({"max_model_len"})))
            ),
            (),
            False,
        ),
        (RankEnd(1, "ended", 143), (2,), True),
        (RankEnd(1, "ended", 143), (), False),
    ],
)
def test_permitted_change_stays_if_only_another_reason_stops_it(of_rank_0, silent, left):
    ends = {0: of_rank_0, 1: FAILED}
    assert is_change_left(decide(1, ends, {}, silent=silent), ends) is left


def test_rank_0_reports_the_relaunch_of_each_rank(job):
    job.start(2, "--idempotent", fits={"1": 1792}, modes={"0": "writes"}, after_s="0.5")
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert (
        "oomguard: The rank can run again, because --idempotent permits repeating its side effects: rank=0"
        in ended[0][2]
    )
    assert "results.jsonl" in ended[0][2]
