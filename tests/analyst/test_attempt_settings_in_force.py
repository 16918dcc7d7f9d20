"""What an attempt really ran with: told arguments, changes of the engine that failed, and changes that did not take effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oomguard.analyst.attempt_settings import (
    find_ineffective_change,
    given_settings,
    with_effective_settings,
)
from oomguard.core.facts import GIB, Fact
from oomguard.core.incident import Attempt, Effect, Incident, Patch, SettingInForce
from oomguard.diagnosis import assess, default_rules
from oomguard.engines.command import (
    EngineChange,
    Launch,
    StartedEngine,
    changes_with,
    failed_engine,
)
from oomguard.engines.vllm import launch as vllm
from oomguard.engines.vllm import plugin
from oomguard.remedy.policy import Policy
from support.each import each

ENGINE = Path(__file__).with_name("fake_engine.py")
SCRIPT = Launch(("python", "s.py"))
SERVE = Launch(("vllm", "serve", "m"))
SPACE = "VLLM_CPU_KVCACHE_SPACE"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv(SPACE, raising=False)


def run(*engine, options=()):
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        *options,
        "--",
        sys.executable,
        str(ENGINE),
        *engine,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ)
    )


def test_change_that_the_program_overrides_ends_the_run():
    ran = run("--mode", "stubborn", "--count", os.devnull)
    assert ran.returncode == 1
    assert ran.stderr.count("Attempt ended") == 2
    assert (
        "The change did not take effect, so oomguard does not retry: setting=max_model_len wanted=1792 in_force=32768"
        in ran.stderr
    )
    assert "because=\"the program's own code sets it" in ran.stderr


def test_a_change_that_no_engine_took_ends_the_run(tmp_path):
    ran = run("--mode", "deaf", "--count", str(tmp_path / "count.log"))
    assert ran.returncode == 1
    assert (tmp_path / "count.log").read_text().split() == ["32768", "32768"]
    assert "The change did not reach the engine" in ran.stderr


def test_what_an_engine_does_not_print_the_plugin_tells():
    ran = run("--mode", "silent", options=("--dry-run",))
    assert "Lower max_model_len from 32768 to 1792" in ran.stderr
    assert "you set it; --allow reduces-capacity permits it" in ran.stderr


def incident(kind="kv_cache_too_small_for_max_len", phase="kv_cache_init", **facts):
    return Incident(
        kind, "", "vllm", phase=phase, facts={n: Fact(n, v, line=9) for n, v in facts.items()}
    )


def attempt(setting, old, new):
    patch = Patch(setting, old, new, Effect.REDUCES_CAPACITY, "")
    return Attempt(2, {setting: new}, (patch,))


def told(over=None, **config):
    return (StartedEngine("m", 1, 1, {}, config, over or {}),)


def test_engines_final_arguments_show_a_lost_change():
    over = find_ineffective_change(
        attempt("max_num_seqs", 256, 8), incident(), vllm, SCRIPT, told(max_num_seqs=256)
    )
    assert (over.setting, over.wanted, over.shown) == ("max_num_seqs", 8, 256)
    assert over.why == "the program's own code sets it"


@each("config", [{"max_num_seqs": 8}, {"max_num_seqs": 7}, {}])
def test_arrived_or_rounded_change_does_not_count_as_lost(config):
    assert (
        find_ineffective_change(
            attempt("max_num_seqs", 256, 8), incident(), vllm, SCRIPT, told(**config)
        )
        is None
    )


def test_the_variable_that_beats_a_change_is_named(monkeypatch):
    monkeypatch.setenv(SPACE, "1")
    failed = incident(on_cpu=True, kv_cache_requested_bytes=GIB)
    over = find_ineffective_change(
        attempt("kv_cache_memory_bytes", GIB, 5), failed, vllm, SERVE, ()
    )
    assert over.why == f"{SPACE}=1 in the environment overrides flags and arguments"


def test_rounded_request_contradicts_only_figures_far_off():
    desired, total = (
        Fact("desired_bytes", round(0.5 * 80 * GIB), slack=0.005 * GIB, line=9),
        Fact("device_total_bytes", 80 * GIB),
    )
    failed = Incident(
        "cuda_oom", "", "vllm", facts={"desired_bytes": desired, "device_total_bytes": total}
    )
    assert (
        find_ineffective_change(
            attempt("gpu_memory_utilization", 0.5, 0.7), failed, vllm, SERVE, ()
        )
        is not None
    )
    assert (
        find_ineffective_change(
            attempt("gpu_memory_utilization", 0.9, 0.50001), failed, vllm, SERVE, ()
        )
        is None
    )


def test_programs_own_values_precede_the_change():
    listed = {"max_model_len_tokens": Fact("max_model_len_tokens", 32768)}
    failed = Incident("cuda_oom", "", "vllm", facts=listed)
    assert (
        find_ineffective_change(attempt("max_model_len", 32768, 7), failed, vllm, SCRIPT, ())
        is None
    )
    ran = with_effective_settings(
        failed, engine=vllm, first=SCRIPT, launch=SCRIPT, changed={"max_model_len": 7}
    )
    assert ran.facts["max_model_len_tokens"].value == 7


def test_a_byte_count_in_the_environment_is_the_setting_in_force(monkeypatch):
    monkeypatch.setenv(SPACE, "1")
    ran = with_effective_settings(
        incident(on_cpu=True), engine=vllm, first=SERVE, launch=SERVE, changed={}
    )
    assert (
        ran.settings["kv_cache_memory_bytes"].value,
        ran.settings["kv_cache_memory_bytes"].source,
    ) == (
        GIB,
        f"{SPACE}=1",
    )
    assert ran.facts["kv_cache_memory_bytes_set"].value is True


def test_overridden_byte_count_may_count_again(monkeypatch):
    """Both are the user's: going back to the one that holds a request raises nothing that the user did not write."""
    monkeypatch.setenv(SPACE, "0")
    given = replace(
        incident(
            "kv_cache_none_left",
            on_cpu=True,
            max_model_len_tokens=8192,
            kv_cache_needed_bytes=GIB // 64,
        ),
        settings={
            "kv_cache_memory_bytes": SettingInForce(
                "kv_cache_memory_bytes", GIB // 4, True, "printed"
            )
        },
    )
    ran = with_effective_settings(given, engine=vllm, first=SERVE, launch=SERVE, changed={})
    assert ran.number("overridden_kv_cache_bytes") == GIB // 4
    found = assess(ran, default_rules(), Policy())
    assert found.causes[0].rule == "OG222"
    assert [(p.setting, p.new, p.blocked_by) for p in found.plan] == [
        ("kv_cache_memory_bytes", GIB // 4, None)
    ]


def test_engines_final_value_counts_over_the_given_one(tmp_path):
    told = tmp_path / "told.jsonl"
    rows = [
        {"arguments": {"kv_cache_memory_bytes": 5}},
        {"config": {"kv_cache_memory_bytes": GIB, "max_num_seqs": 128}},
    ]
    told.write_text(
        "\n".join(json.dumps({"pid": 1, "order": 1, "model": "m", **row}) for row in rows)
    )
    launch = Launch(("python", "s.py"), {plugin.ACKNOWLEDGE: str(told)})
    given = incident()
    given = replace(
        given,
        settings={
            "kv_cache_memory_bytes": SettingInForce("kv_cache_memory_bytes", 5, True, "printed")
        },
    )
    ran = with_effective_settings(given, engine=vllm, first=SCRIPT, launch=launch, changed={})
    assert (
        ran.settings["kv_cache_memory_bytes"].value,
        ran.settings["kv_cache_memory_bytes"].source,
    ) == (
        GIB,
        "in effect",
    )
    assert ran.facts["kv_cache_memory_bytes"].value == GIB
    assert "max_num_seqs" not in ran.settings


def test_a_change_of_another_engine_is_not_in_force_for_this_one():
    first = Launch(
        ("python", "s.py"), engine_changes=(EngineChange("a", None, {"max_model_len": 7}),)
    )
    ran = {
        model: with_effective_settings(
            incident(model=model),
            engine=vllm,
            first=first,
            launch=first,
            changed={"max_model_len": 7},
        )
        for model in "ab"
    }
    assert "max_model_len" in ran["a"].settings
    assert "max_model_len" not in ran["b"].settings


def test_what_the_last_engine_was_given_is_all_that_the_user_set():
    started = (
        StartedEngine("a", 1, 1, {"max_model_len": 5}),
        StartedEngine("b", 2, 1, {"max_num_seqs": 6}),
    )
    assert {name: one.value for name, one in given_settings(vllm, SCRIPT, started).items()} == {
        "model": "b",
        "max_num_seqs": 6,
    }
    assert given_settings(vllm, SCRIPT, ()) == {}


def test_engine_that_started_last_is_the_one_that_failed():
    started = (StartedEngine("m", 1, 1), StartedEngine("m", 2, 1))
    assert failed_engine(incident(model="m"), started).order == 2
    assert failed_engine(incident(model="m", phase="decode"), started) is None
    (change,) = changes_with((), incident(model="m"), started, {"max_model_len": 7})
    assert (change.model, change.order) == ("m", 2)


def test_changes_of_one_engine_are_joined_separately():
    one = changes_with((), incident(model="a"), (), {"max_model_len": 7})
    two = changes_with(one, incident(model="b"), (), {"max_model_len": 9})
    three = changes_with(two, incident(model="a"), (), {"max_num_seqs": 1})
    assert [(c.model, dict(c.settings)) for c in three] == [
        ("a", {"max_model_len": 7, "max_num_seqs": 1}),
        ("b", {"max_model_len": 9}),
    ]


def test_engine_process_may_use_what_its_host_has(tmp_path):
    said = tmp_path / "said.jsonl"
    said.write_text(
        json.dumps({"pid": 7, "process": "Worker", "limits": {"process_data_limit_bytes": 3 * GIB}})
        + "\n"
    )
    launch = replace(SERVE, env={plugin.LOG_FILE: str(said)})
    ran = with_effective_settings(incident(), engine=vllm, first=launch, launch=launch, changed={})
    assert ran.facts["process_data_limit_bytes"].value == 3 * GIB
    assert (
        "process_data_limit_bytes"
        not in with_effective_settings(
            incident(), engine=vllm, first=SERVE, launch=SERVE, changed={}
        ).facts
    )
