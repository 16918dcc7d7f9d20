"""The plugin where there is no vLLM: it must do nothing, and never raise. With vLLM: tests/vllm."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

from oomguard.engines.command import Launch
from oomguard.engines.vllm import launch as vllm
from oomguard.engines.vllm import plugin as vllm_plugin


def test_the_entry_point_is_installed():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.load() for point in points if point.name == "oomguard"] == [vllm_plugin.register]


def test_without_our_variable_nothing_is_imported():
    code = (
        "import sys; before = set(sys.modules); from oomguard.engines.vllm.plugin import register; register();"
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] not in ('oomguard', 'json', 'logging')"
        " and m.split('.')[0] not in sys.stdlib_module_names))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()
        == "[]"
    )


def test_whatever_the_variable_holds_it_never_raises(subtests, monkeypatch):
    for raw in ["not json", "[]", '{"max_model_len": 1}', "\x01"]:
        with subtests.test(raw=raw):
            monkeypatch.setenv(vllm_plugin.OVERRIDES, raw)
            vllm_plugin.register()


def test_carried_plugin_is_found_by_a_python_without_oomguard(tmp_path):
    launch = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path)
    code = (
        "import importlib.metadata as m;"
        "print([(p.name, p.value) for p in m.entry_points(group='vllm.general_plugins')]);"
        "import oomguard_vllm_plugin as p; p.register()"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**launch.env},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[('oomguard', 'oomguard_vllm_plugin:register')]"
    assert json.loads(launch.env[vllm_plugin.OVERRIDES]) == {"max_model_len": 7}


def test_an_allow_list_of_plugins_is_joined_and_never_made(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert (
        "VLLM_PLUGINS"
        not in vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path).env
    )
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert (
        vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path).env["VLLM_PLUGINS"]
        == "mine,oomguard"
    )


def test_the_users_pythonpath_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert (
        vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path)
        .env["PYTHONPATH"]
        .endswith(":/theirs")
    )
