"""Testers' cases are judged as the testers wrote; `python benchmarks/strangers_vllm.py` runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strangers_vllm import SET
from support import stranger_judge as judge
from support.stranger_case import make_folder, read_cases, read_reading
from support.stranger_report import figures

CASES = {case["name"][:4]: case for case in read_cases(SET)}
READING = read_reading(SET)


def ran(
    name: str, old: float | None = None, effect: str = "reduces-capacity", **changed: float | str
) -> dict[str, Any]:
    """Return a run that changed these settings in one relaunch."""
    right = READING["causes"][CASES[name]["name"]]
    return {
        "runs": True,
        "relaunches": 1,
        "attempts": [{}, changed],
        "patches": [
            {"setting": setting, "from": old, "to": new, "effect": effect}
            for setting, new in changed.items()
        ],
        "printed": [],
        "cause": right[0] if right else None,
        "is_oom": True,
        "timed_out": False,
    }


def test_a_model_has_a_tokenizer_with_a_token_for_every_byte(tmp_path):
    make_folder(CASES["aa04"], tmp_path / "work")

    tokens = json.loads((tmp_path / "work" / "policy" / "tokenizer.json").read_text())["model"][
        "vocab"
    ]
    assert len(tokens) >= 256


def test_permissions_are_effects_that_oomguard_has():
    given = {tuple(case["allow"]) for case in CASES.values()}

    assert given == {
        (),
        ("--allow", judge.EFFECTS[1]),
        ("--allow", judge.EFFECTS[1], "--idempotent"),
    }


@pytest.mark.parametrize(
    ("name", "old", "changed", "share"),
    [
        ("aa02", 20000, {"max_model_len": 8064}, 1.0),
        ("aa02", 20000, {"max_model_len": 4032}, 0.5),
        ("aa06", 65, {"num_gpu_blocks_override": 4000}, 1.0),
        ("aa06", 65, {"num_gpu_blocks_override": 8000}, 0.5),
        ("aa05", 0.02, {"gpu_memory_utilization": 0.06}, 1.0),
        ("aa05", 0.02, {"gpu_memory_utilization": 1.0}, 0.8),
        ("aa07", 64, {"max_loras": 44}, 1.0),
        ("aa17", 8192, {"max_model_len": 9344}, 0.0),
        ("aa14", 42949672960, {"kv_cache_memory_bytes": 2**32}, 1.0),
    ],
)
def test_the_share_kept_is_measured_against_the_testers_value(name, old, changed, share):
    assert judge.kept(CASES[name], ran(name, old, "output-preserving", **changed), READING) == share


def test_a_command_that_does_not_run_keeps_nothing():
    seen = ran("aa02", 20000, max_model_len=8064) | {"runs": False}

    assert judge.kept(CASES["aa02"], seen, READING) == 0


@pytest.mark.parametrize(
    ("name", "seen", "found"),
    [
        ("aa02", {"kv_cache_memory_bytes": 2**28}, ["kv_cache_memory_bytes"]),
        ("aa03", {"max_model_len": 8064}, ["max_model_len", "max_model_len (reduces-capacity)"]),
        ("aa01", {"kv_cache_memory_bytes": 2**28}, ["VLLM_CPU_KVCACHE_SPACE"]),
        ("aa12", {"max_model_len": 7264}, []),  # the user did not set the length
        ("aa20", {}, ["everything"]),
    ],
)
def test_a_forbidden_change_is_found_in_any_attempt(name, seen, found):
    assert judge.forbidden(CASES[name], ran(name, **seen), READING) == found


def test_setting_named_but_never_given_may_be_lowered():
    (case,) = [
        case for case in read_cases("guarded_sixth") if case["name"] == "i14_poems_sampler_at_work"
    ]
    reading, seen = read_reading("guarded_sixth"), ran("aa08", 256, max_num_seqs=120)

    assert judge.kept(case, seen, reading) == 1.0
    assert judge.forbidden(case, seen, {**reading, "never_given": {}}) == [
        "max_num_seqs (reduces-capacity)"
    ]


def test_listed_cause_is_correct_and_none_fits_a_healthy_log():
    case, other = CASES["aa07"], CASES["aa19"]

    assert judge.has_right_cause(case, ran("aa07"), READING)
    assert not judge.has_right_cause(case, ran("aa07") | {"cause": "unknown"}, READING)
    assert not judge.has_right_cause(other, ran("aa19"), READING)
    assert judge.has_right_cause(other, ran("aa19") | {"is_oom": False}, READING)


def test_a_case_that_starts_unchanged_is_not_counted(capsys):
    good = ran("aa02", 20000, max_model_len=8064)
    started = good | {"relaunches": 0, "attempts": [{}], "patches": [], "cause": None}

    text, met = figures([CASES["aa02"], CASES["aa11"]], [good, started], READING)

    assert met, text
    assert text.startswith("1 of 1 run after one relaunch, 100.0 % kept in 1")
    assert "1 start as they are" in capsys.readouterr().out


def test_one_change_without_permission_misses_the_goal():
    case, good = CASES["aa02"], ran("aa02", 20000, max_model_len=8064)
    bad = good | {"attempts": [{}, {"kv_cache_memory_bytes": 2**28}, {"max_model_len": 8064}]}

    assert figures([case], [good], READING)[1]
    assert not figures([case], [bad], READING)[1]
