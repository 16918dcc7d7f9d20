"""Testers' cases are judged as the testers wrote; `python benchmarks/strangers_vllm.py` runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import strangers_vllm
from support import stranger_judge as judge
from support.stranger_case import make_folder, read_cases, read_reading

NAME = "strangers_40"
CASES = {case["name"]: case for case in read_cases(NAME)}
READING = read_reading(NAME)


def ran(
    name: str, old: float | None = None, effect: str = "reduces-capacity", **changed: float | str
) -> dict[str, Any]:
    """What a run looks like that changed these settings in one relaunch."""
    patches = [{"setting": setting, "from": old, "to": new, "effect": effect} for setting, new in changed.items()]
    return {
        "runs": True,
        "relaunches": 1,
        "attempts": [{}, changed],
        "patches": patches,
        "printed": [],
        "cause": READING["causes"][name][0] if READING["causes"][name] else None,
        "is_oom": True,
    }


def test_a_model_has_a_tokenizer_with_a_token_for_every_byte(tmp_path):
    make_folder(CASES["c13_yaml_mm_profile"], tmp_path / "work")

    tokens = json.loads((tmp_path / "work" / "blip" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(tokens) == 256 + 5  # <image> is the fifth special one
    assert (tmp_path / "work" / "blip" / "preprocessor_config.json").is_file()


def test_permissions_are_effects_that_oomguard_has():
    given = {tuple(case["allow"]) for case in CASES.values()}

    assert given == {(), ("--idempotent",), ("--allow", judge.EFFECTS[1])}


@pytest.mark.parametrize(
    ("name", "old", "changed", "share"),
    [
        ("s01_serve_qwen3_32k", 32000, {"max_model_len": 13696}, 1.0),
        ("s01_serve_qwen3_32k", 32000, {"max_model_len": 6848}, 0.5),
        ("s06_serve_gemma_blocks", 150, {"num_gpu_blocks_override": 468}, 0.5),
        ("s04_serve_util_low", 0.015, {"gpu_memory_utilization": 0.05}, 1.0),
        ("s04_serve_util_low", 0.015, {"gpu_memory_utilization": 1.0}, 0.9),
        ("s07_serve_lora_slots", 256, {"max_loras": 60}, 1.0),
        ("c14_yaml_gemma_step", 16384, {"max_num_batched_tokens": 4225}, 1.0),
        ("c14_yaml_gemma_step", 16384, {"max_model_len": 9344}, 0.0),
        ("b20_latency_env_flag", 262144, {"kv_cache_memory_bytes": 2**32}, 1.0),
    ],
)
def test_the_share_kept_is_measured_against_the_testers_value(name, old, changed, share):
    assert judge.kept(CASES[name], ran(name, old, "output-preserving", **changed), READING) == share


@pytest.mark.parametrize(("found", "share"), [("fp8", 1.0), ("fp8_e5m2", 1.0), ("float16", 0.0)])
def test_a_text_is_one_of_those_that_are_best(found, share):
    (case,) = [case for case in read_cases("strangers_fourth") if case["name"] == "u09_bench_latency_fp8"]
    seen = ran("s01_serve_qwen3_32k", None, "changes-outputs", kv_cache_dtype=found)
    assert judge.kept(case, seen, read_reading("strangers_fourth")) == share


def test_what_does_not_run_keeps_nothing():
    seen = ran("s01_serve_qwen3_32k", 32000, max_model_len=13696) | {"runs": False}

    assert judge.kept(CASES["s01_serve_qwen3_32k"], seen, READING) == 0


@pytest.mark.parametrize(
    ("name", "seen", "found"),
    [
        ("s01_serve_qwen3_32k", {"kv_cache_memory_bytes": 2**28}, ["kv_cache_memory_bytes"]),
        ("p45_no_permission", {"max_model_len": 8064}, ["max_model_len", "max_model_len (reduces-capacity)"]),
        ("b17_latency_needs_it", {"max_model_len": 3968}, ["max_model_len below 6200"]),
        ("b17_latency_needs_it", {"max_model_len": 6208}, []),
        ("c12_yaml_hf_overrides", {"max_model_len": 24448}, []),  # the user left the length alone
        ("p44_not_memory_keyerror", {}, ["everything"]),
    ],
)
def test_what_must_not_change_is_found_in_any_attempt(name, seen, found):
    assert judge.forbidden(CASES[name], ran(name, **seen), READING) == found


def test_the_first_of_two_engines_has_to_keep_its_length():
    case = CASES["p37_two_engines_second"]
    seen = ran(case["name"], 32768, max_model_len=4992)

    assert not judge.forbidden(case, seen | {"printed": ["WRITER 2048", "JUDGE 4992"]}, READING)
    assert judge.forbidden(case, seen | {"printed": ["WRITER 2048", "WRITER 1024"]}, READING)


def test_a_setting_that_is_set_as_the_user_wrote_it_has_not_changed():
    case, reading = (
        next(c for c in read_cases("strangers_20") if c["name"] == "b09_throughput_env_30"),
        read_reading("strangers_20"),
    )
    seen = {"relaunches": 1, "patches": [], "printed": []}

    assert not judge.forbidden(case, seen | {"attempts": [{}, {"kv_cache_memory_bytes": 2**29}]}, reading)
    assert judge.forbidden(case, seen | {"attempts": [{}, {"kv_cache_memory_bytes": 2**28}]}, reading)


def test_a_flag_that_the_shell_ate_was_never_given():
    case, reading = (
        next(c for c in read_cases("strangers_20") if c["name"] == "w14_comment_ate_the_flags"),
        read_reading("strangers_20"),
    )
    patch = {"setting": "max_model_len", "from": 131072, "to": 24448, "effect": "reduces-capacity"}
    seen = {
        "runs": True,
        "relaunches": 1,
        "patches": [patch],
        "printed": [],
        "attempts": [{}, {"max_model_len": 24448}],
    }

    assert judge.kept(case, seen, reading) == 1.0
    assert judge.forbidden(case, seen, {**reading, "never_given": {}}) == ["max_model_len (reduces-capacity)"]


def test_a_cause_is_right_if_it_is_among_those_and_none_may_be_named_where_memory_did_not_fail():
    case, other = CASES["s07_serve_lora_slots"], CASES["r23_runbatch_not_memory"]

    assert judge.has_right_cause(case, ran(case["name"]), READING)
    assert not judge.has_right_cause(case, ran(case["name"]) | {"cause": "unknown"}, READING)
    assert not judge.has_right_cause(other, ran(other["name"]), READING)
    assert judge.has_right_cause(other, ran(other["name"]) | {"is_oom": False}, READING)


def test_a_case_that_starts_as_it_is_counts_nowhere(capsys):
    broken, whole = CASES["s01_serve_qwen3_32k"], CASES["s03_serve_abbrev_dup"]
    good = ran(broken["name"], 32000, max_model_len=13696) | {"timed_out": False}
    started = good | {"relaunches": 0, "attempts": [{}], "patches": [], "cause": None}

    text, met = strangers_vllm.figures([broken, whole], [good, started], READING)

    assert met, text
    assert text.startswith("1 of 1 run after one relaunch, 100.0 % kept in 1")
    assert "1 start as they are" in capsys.readouterr().out


def test_one_change_without_permission_misses_the_goal():
    case = CASES["s01_serve_qwen3_32k"]
    good = ran(case["name"], 32000, max_model_len=13696) | {"timed_out": False}
    bad = good | {"attempts": [{}, {"kv_cache_memory_bytes": 2**28}, {"max_model_len": 13696}]}

    assert strangers_vllm.figures([case], [good], READING)[1]
    assert not strangers_vllm.figures([case], [bad], READING)[1]
