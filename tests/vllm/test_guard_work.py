"""The real engine under a guard, whose core dies at work: its caller gets every output once, as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.vllm_script import result_of

DYING = Path(__file__).parents[2] / "benchmarks" / "support" / "dying_engine"
ALL = 40


def run(folder: Path, env: dict[str, str], way: str, **more: str) -> dict[str, Any]:
    """Run a case of scripts/working.py and return what it printed last."""
    found: dict[str, Any] = result_of(folder, env, "working.py", way, **more)
    return found


def test_a_killed_core_is_made_again_and_every_output_comes_once_and_equal(folder, vllm_env):
    found = run(folder, vllm_env, "killed")
    assert found["equal"] == ALL
    assert [error for _, error in found["attempts"]] == ["EngineDeadError", ""]
    assert found["left"]["processes"] == found["left"]["threads"] == []


@pytest.mark.breadth
def test_without_restart_the_caller_of_a_killed_core_knows_within_five_seconds(folder, vllm_env):
    found = run(folder, vllm_env, "refused")
    assert found["raised"] == "EngineDeadError"
    assert found["after_s"] <= 5


@pytest.mark.breadth
def test_a_stream_goes_on_from_the_tokens_that_were_delivered(folder, vllm_env):
    found = run(folder, vllm_env, "streams")
    assert found["equal"] == ALL
    assert found["later"]


@pytest.mark.breadth
def test_ctrl_c_while_a_core_is_made_again_ends_the_program_at_once_and_leaves_nothing(folder, vllm_env):
    found = run(folder, vllm_env, "interrupted")
    assert found["interrupted"]
    assert found["after_s"] <= 5
    assert found["left"]["processes"] == found["left"]["threads"] == []


@pytest.mark.breadth
def test_a_request_that_no_engine_survives_fails_alone(folder, vllm_env):
    found = run(folder, vllm_env, "poison", DYING_TOKEN="5", PYTHONPATH=str(DYING))
    assert (found["failed"], found["equal"]) == ([7], ALL)
    assert "ran alone" in found["why"]


@pytest.mark.breadth
def test_vectors_and_scores_come_all_and_of_one_that_no_engine_survives_all_others(folder, vllm_env):
    found = run(folder, vllm_env, "vectors", DYING_TOKEN="5", PYTHONPATH=str(DYING))
    assert (found["embed"], found["score"]) == (True, True)
    assert [error for _, error in found["attempts"]].count("EngineDeadError") == 2
    assert (found["missing"], found["partial"]) == ([7], True)


@pytest.mark.breadth
def test_chats_and_beams_are_those_of_a_run_without_a_death(folder, vllm_env):
    found = run(folder, vllm_env, "methods")
    assert (found["chat"], found["beams"]) == (True, True)
    assert [error for _, error in found["attempts"]].count("EngineDeadError") == 2
