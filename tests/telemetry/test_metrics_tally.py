"""The tally counts each attempt once, by what it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.incident import Attempt, Cause, Effect, Incident, Patch
from oomguard.telemetry.metrics import Tally, prediction_errors

KINDS = ("cuda_oom", "host_oom")
CAUSES = ("batch_too_large", "fragmentation", None)


def incident(kind: str = "cuda_oom", cause: str | None = "batch_too_large") -> Incident:
    causes = () if cause is None else (Cause(cause, "OG1", 0.9, (), ""),)
    return Incident(kind, "x", causes=causes)


def patch(setting: str = "batch_size", predicts: dict[str, float] | None = None) -> Patch:
    return Patch(setting, 64, 32, Effect.OUTPUT_PRESERVING, "", predicts=predicts or {})


ATTEMPTS = st.lists(
    st.tuples(
        st.sampled_from([None, *((k, c) for k in KINDS for c in CAUSES)]),
        st.integers(0, 3),
        st.integers(0, 2),
    )
)


@given(ATTEMPTS)
def test_the_counters_are_sums_over_the_attempts(drawn):
    tally, total = Tally(), 0.0
    for number, (found, status, patches) in enumerate(drawn, 1):
        new = tuple(patch(f"s{i}") for i in range(patches))
        attempt = Attempt(number, {}, new, found and incident(*found), status, seconds=2.0)
        tally.began(new, is_relaunch=number > 1)
        tally.ended(attempt)
        total += 0.0 if attempt.succeeded else 2.0

    assert tally.attempts == len(drawn)
    assert tally.relaunches == max(0, len(drawn) - 1)
    assert tally.failed_attempts * 2.0 == tally.failed_seconds == total
    assert sum(tally.incidents.values()) == sum(found is not None for found, _, _ in drawn)
    assert sum(tally.patches.values()) == sum(patches for _, _, patches in drawn)


def test_an_incident_that_no_rule_explains_has_the_unknown_cause():
    tally = Tally()
    tally.ended(Attempt(1, {}, incident=incident(cause=None), exit_status=1))
    assert tally.figure("incidents") == {("cuda_oom", "unknown"): 1}


@pytest.mark.parametrize(("found", "failed"), [(None, 0), (incident(), 1)])
def test_attempt_stopped_by_its_user_fails_only_with_an_incident(found, failed):
    tally = Tally()
    tally.ended(
        Attempt(1, {}, incident=found, exit_status=143, error="exit status 143"), is_stopped=True
    )
    assert tally.failed_attempts == failed


def test_the_start_time_is_there_while_an_attempt_runs_only():
    tally = Tally()
    assert tally.figure("began_at") is None
    tally.began((), is_relaunch=False)
    assert tally.figure("began_at") is not None
    tally.ended(Attempt(1, {}, exit_status=0))
    assert tally.figure("began_at") is None


def test_prediction_error_is_measured_over_predicted_share():
    predicted = (patch(predicts={"kv_cache_available_bytes": 100, "never_measured": 5, "zero": 0}),)
    measured = {"kv_cache_available_bytes": 87.0, "never_predicted": 3.0, "zero": 1.0}
    assert prediction_errors(Attempt(2, {}, predicted, measured=measured)) == {
        "kv_cache_available_bytes": pytest.approx(-0.13)
    }


def test_survived_steps_of_ended_attempts_and_of_the_one_that_runs_are_added():
    tally = Tally()
    for number in (1, 2):
        measured = {"survived_steps": 3.0, "requests_without_room": 1.0}
        tally.ended(Attempt(number, {}, exit_status=0, measured=measured))
    assert (tally.survived_steps, tally.requests_without_room) == (6, 2)
    now = tally.with_survived([{"took_ms": 0.4}, {"took_ms": 0.4, "ended": "r1"}])
    assert now == {"survived_steps": 8, "requests_without_room": 3}
