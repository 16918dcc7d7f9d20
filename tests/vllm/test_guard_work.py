"""The real engine under a guard, whose core dies at work: its caller gets every output once, as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.vllm_script import result_of

ALL = 40


def run(folder: Path, env: dict[str, str], way: str, **more: str) -> dict[str, Any]:
    """Run a case of scripts/working.py and return what it printed last."""
    found: dict[str, Any] = result_of(folder, env, "working.py", way, **more)
    return found


def test_killed_core_restarts_and_outputs_come_once_and_equal(folder, vllm_env):
    found = run(folder, vllm_env, "killed")
    assert found["equal"] == ALL
    assert [error for _, error in found["attempts"]] == ["EngineDeadError", ""]
    assert found["left"]["processes"] == found["left"]["threads"] == []


def test_a_stream_goes_on_from_the_tokens_that_were_delivered(folder, vllm_env):
    found = run(folder, vllm_env, "streams")
    assert found["equal"] == ALL
    assert found["later"]


def test_ctrl_c_during_a_core_restart_ends_the_program_at_once(folder, vllm_env):
    found = run(folder, vllm_env, "interrupted")
    assert found["interrupted"]
    assert found["after_s"] <= 5
    assert found["left"]["processes"] == found["left"]["threads"] == []
