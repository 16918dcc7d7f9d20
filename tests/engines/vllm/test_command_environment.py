"""The environment of a command that starts vLLM: variables that beat flags, and what carries the plugin past wrappers."""

from __future__ import annotations

import shlex

import pytest

from oomguard.core.facts import Fact
from oomguard.engines.command import Launch
from oomguard.engines.vllm import insight
from oomguard.engines.vllm import launch as vllm

ON_CPU = {"on_cpu": Fact("on_cpu", True)}
SPACE = "VLLM_CPU_KVCACHE_SPACE"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in (SPACE, "VLLM_PLUGINS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def launch(line):
    return Launch(tuple(shlex.split(line)))


def test_a_variable_that_beats_a_flag_is_the_setting_in_force(monkeypatch):
    monkeypatch.setenv(SPACE, "2")
    found = insight.beaten_by(
        launch("vllm serve m --kv-cache-memory-bytes 5"), "kv_cache_memory_bytes", ON_CPU
    )
    assert (found.value, found.set_by_user, found.source) == (2 * 2**30, True, f"{SPACE}=2")


def test_it_counts_on_the_cpu_alone(monkeypatch):
    monkeypatch.setenv(SPACE, "2")
    assert insight.beaten_by(launch("vllm serve m"), "kv_cache_memory_bytes", {}) is None
    assert insight.beaten_by(launch("vllm serve m"), "max_model_len", ON_CPU) is None


def test_what_a_wrapper_sets_counts_over_what_is_inherited(subtests, monkeypatch):
    for line, value in [
        (f"env {SPACE}=3 vllm serve m", 3 * 2**30),
        (f"bash -c '{SPACE}=3 exec vllm serve m'", 3 * 2**30),
        (f"env -u {SPACE} vllm serve m", None),
        ("env -i vllm serve m", None),
        (f"env {SPACE}= vllm serve m", None),
    ]:
        with subtests.test(line=line, value=value):
            monkeypatch.setenv(SPACE, "2")
            found = insight.beaten_by(launch(line), "kv_cache_memory_bytes", ON_CPU)
            assert (None if found is None else found.value) == value


def test_changing_a_variables_setting_removes_the_variable(monkeypatch):
    monkeypatch.setenv(SPACE, "2")
    assert vllm.shown(launch("vllm serve m"), {"kv_cache_memory_bytes": 5}) == (
        f"env -u {SPACE} vllm serve m --kv-cache-memory-bytes 5"
    )
    assert (
        vllm.shown(launch("vllm serve m"), {"max_model_len": 5}) == "vllm serve m --max-model-len 5"
    )


def test_one_that_a_wrapper_sets_is_taken_out_of_the_command(subtests):
    for line, changed in [
        (
            f"nice -n 3 env {SPACE}=40 vllm serve m",
            "nice -n 3 env vllm serve m --kv-cache-memory-bytes 5",
        ),
        (
            f"env A=1 {SPACE}=4 {SPACE}=40 vllm serve m",
            "env A=1 vllm serve m --kv-cache-memory-bytes 5",
        ),
        (
            f"env {SPACE}=4 nohup env B=2 {SPACE}=40 vllm serve m",
            "env nohup env B=2 vllm serve m --kv-cache-memory-bytes 5",
        ),
        (
            f"bash -c '{SPACE}=40 B=2 exec vllm serve m'",
            "bash -c 'B=2 exec vllm serve m --kv-cache-memory-bytes 5'",
        ),
        (f"env -u {SPACE} vllm serve m", f"env -u {SPACE} vllm serve m --kv-cache-memory-bytes 5"),
    ]:
        with subtests.test(line=line, changed=changed):
            assert vllm.shown(launch(line), {"kv_cache_memory_bytes": 5}) == changed


def test_overriding_wrapper_variable_removes_both(monkeypatch):
    monkeypatch.setenv(SPACE, "2")
    assert vllm.shown(launch(f"env {SPACE}=40 vllm serve m"), {"kv_cache_memory_bytes": 5}) == (
        f"env -u {SPACE} env vllm serve m --kv-cache-memory-bytes 5"
    )


def test_one_that_the_shell_exports_first_stays():
    text = f"export {SPACE}=40; exec vllm serve m"
    assert f"export {SPACE}=40" in vllm.shown(
        Launch(("bash", "-c", text)), {"kv_cache_memory_bytes": 5}
    )


def test_the_user_s_list_of_plugins_is_joined_where_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert (
        vllm.apply(launch("python s.py"), {"max_model_len": 7}, tmp_path).env["VLLM_PLUGINS"]
        == "mine,oomguard"
    )
    changed = vllm.apply(launch("env VLLM_PLUGINS=a,b python s.py"), {"max_model_len": 7}, tmp_path)
    assert changed.argv == (
        "env",
        "VLLM_PLUGINS=a,b",
        "VLLM_PLUGINS=a,b,oomguard",
        "python",
        "s.py",
    )


def test_a_list_that_names_nothing_gets_our_plugin_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert (
        vllm.apply(launch("python s.py"), {"max_model_len": 7}, tmp_path).env["VLLM_PLUGINS"]
        == "oomguard"
    )


def test_the_line_to_paste_lets_the_plugin_in(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert "VLLM_PLUGINS=mine,oomguard python s.py" in vllm.shown(
        launch("python s.py"), {"max_model_len": 7}
    )


def test_program_without_inherited_variables_gets_ours(tmp_path):
    changed = vllm.apply(launch("env -i PATH=/x python s.py"), {"max_model_len": 7}, tmp_path)
    assert changed.env == {}
    assert changed.argv[:3] == ("env", "-i", "PATH=/x")
    assert any(word.startswith("OOMGUARD_VLLM_OVERRIDES=") for word in changed.argv[3:-2])


def test_a_path_that_a_wrapper_sets_is_kept_behind_the_plugin_s(tmp_path):
    changed = vllm.apply(launch("env PYTHONPATH=/x python s.py"), {"max_model_len": 7}, tmp_path)
    assert changed.argv[2].endswith("plugin:/x")
