"""The real engine under a guard in the user's own process: a start that fails for memory is made again, and nothing stays."""

from __future__ import annotations

from pathlib import Path

from support.vllm_script import result_of


def run(folder: Path, env: dict[str, str], *words: str, **more: str) -> list[object]:
    """Run a case of scripts/guarded.py and return what it printed last, as JSON."""
    found: list[object] = result_of(folder, env, "guarded.py", *words, **more)
    return found


def test_llm_with_too_large_a_length_restarts_and_answers(folder, vllm_env):
    tokens, length, attempts, left = run(folder, vllm_env, "llm")
    assert tokens == [8, 8]
    assert length == 1792
    assert attempts == [[[], "RuntimeError"], [["max_model_len 32768 -> 1792"], ""]]
    assert left == {"processes": [], "segments": [], "threads": []}


def test_a_start_that_works_is_made_once_and_left_as_it_is(folder, vllm_env):
    _, length, attempts, left = run(folder, vllm_env, "healthy", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert (length, attempts) == (1024, [[[], ""]])
    assert left["threads"] == []


def test_an_async_engine_is_started_within_its_loop(folder, vllm_env):
    tokens, length, attempts, _ = run(folder, vllm_env, "async")
    assert (tokens, length) == ([8], 1792)
    assert len(attempts) == 2


def test_original_exception_has_the_cores_own_words(folder, vllm_env):
    kind, message, notes, attempts, left = run(folder, vllm_env, "nothing-left")
    assert kind == "RuntimeError"
    assert message.startswith("Engine core initialization failed. See root cause above.")
    (note,) = notes
    assert note.startswith(
        "oomguard: One request of 32,768 tokens needs 16.00 MiB of KV cache, but 0.95 MiB is available"
    )
    assert "  where: vllm 0.32.0, kv cache init, EngineCore pid=" in note
    assert (
        "  do first: Lower max_model_len from 32768 to 1792 (reduces-capacity): max_model_len=1792"
        in note
    ), note
    assert attempts == [[[], "RuntimeError"]]
    assert left == {"processes": [], "segments": [], "threads": []}
