"""What spans carry: numbers by name, and no text of the user's."""

from __future__ import annotations

from oomguard.core.facts import Fact
from oomguard.core.incident import Attempt, Cause, Effect, Incident, Patch
from oomguard.telemetry.spans import of_attempt, of_incident


def test_facts_are_sent_where_they_are_numbers():
    facts = {
        "tried_bytes": Fact("tried_bytes", 2**31, "printed"),
        "model": Fact("model", "/home/me/secret-model", "printed"),
    }
    told = of_incident(Incident("cuda_oom", "a prompt of mine", facts=facts), 1)

    assert told["oomguard.fact.tried_bytes"] == 2**31
    assert "secret-model" not in str(told)
    assert "a prompt of mine" not in str(told)


def test_only_the_first_cause_is_sent_and_none_without_one():
    causes = (Cause("fragmentation", "OG1", 0.9, (), ""), Cause("lora", "OG2", 0.5, (), ""))
    told = of_incident(Incident("cuda_oom", "x", causes=causes), 2)
    assert (told["oomguard.incident.cause"], told["oomguard.incident.rule"]) == (
        "fragmentation",
        "OG1",
    )
    assert "oomguard.incident.cause" not in of_incident(Incident("cuda_oom", "x"), 1)


def test_attempt_has_changes_predictions_and_measurements():
    patch = Patch(
        "max_model_len", 8, 4, Effect.REDUCES_CAPACITY, "", predicts={"kv_cache_needed_bytes": 10}
    )
    measured = {"kv_cache_available_bytes": 12.0}
    attempt = Attempt(2, {"max_model_len": 4}, (patch,), exit_status=0, measured=measured)
    assert of_attempt(attempt) == {
        "oomguard.attempt.number": 2,
        "oomguard.setting.max_model_len": 4,
        "process.exit.code": 0,
        "oomguard.predicted.kv_cache_needed_bytes": 10,
        "oomguard.measured.kv_cache_available_bytes": 12.0,
    }
