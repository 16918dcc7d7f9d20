"""What the plugin tells of the engines of a program: their arguments by known names, what vLLM made of them, what was changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from oomguard.engines.command import EngineChange, Launch
from oomguard.engines.vllm import insight, plugin
from oomguard.engines.vllm import launch as vllm
from oomguard.engines.vllm.in_process.message_receiver import reported_arguments, reported_engines

FAKE = Path(__file__).parents[1] / "fake_vllm.py"


def start(launch, *models):
    env = {name: value for name, value in os.environ.items() if not name.startswith("OOMGUARD_")}
    env |= {**launch.env, "PYTHONPATH": str(Path(__file__).parents[4])}
    ran = subprocess.run(
        [sys.executable, str(FAKE), "sync", *models],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_watched_program_reports_engine_arguments_unchanged(tmp_path):
    launch = insight.watched(Launch(("python", "s.py")), tmp_path)
    plain = start(Launch(("python", "s.py")), "a", "b")

    assert start(launch, "a", "b") == plain
    told = insight.started(launch)
    assert [(one.model, one.order, one.changed) for one in told] == [("a", 1, {}), ("b", 2, {})]
    assert told[0].arguments == {}


def test_changes_are_named_in_our_units(tmp_path):
    changed = vllm.apply(Launch(("python", "s.py")), {"cpu_offload_bytes": 2**30}, tmp_path)
    start(changed, "a")
    (told,) = insight.started(changed)
    assert told.changed == {"cpu_offload_bytes": 2**30}


def test_only_arguments_unlike_their_defaults_are_reported(tmp_path):
    launch = insight.watched(Launch(("python", "s.py")), tmp_path)
    code = (
        "import fake_vllm; fake_vllm.install(); from oomguard.engines.vllm.plugin import register; register();"
        "fake_vllm.AsyncEngineArgs(model='a', max_model_len=9, cpu_offload_gb=2, enable_log_requests=True).create_engine_config()"
    )
    path = os.pathsep.join([str(FAKE.parent), str(FAKE.parents[3])])
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **launch.env, "PYTHONPATH": path},
        check=True,
    )
    (told,) = insight.started(launch)
    assert told.arguments == {"max_model_len": 9, "cpu_offload_bytes": 2 * 2**30}


def test_process_without_an_engine_imports_no_reporter(tmp_path):
    launch = insight.watched(Launch(("python", "s.py")), tmp_path)
    code = "import sys; from oomguard.engines.vllm.plugin import register; register(); print('vllm' in sys.modules)"
    env = {**os.environ, **launch.env, "PYTHONPATH": str(FAKE.parents[3])}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert (ran.stdout.strip(), ran.stderr) == ("False", "")


def test_the_plugin_is_asked_for_known_settings_and_no_others():
    assert "max_model_len" in reported_arguments()
    assert not {"hf_token", "api_key", "hf_overrides"} & set(reported_arguments())


def test_own_engine_command_is_noted_only_by_vllms_log(tmp_path):
    launch = insight.watched(Launch(("env", "A=1", "vllm", "serve", "m")), tmp_path)
    assert (launch.argv, list(launch.env)) == (
        ("env", "A=1", "vllm", "serve", "m"),
        [plugin.LOG_FILE, plugin.STEP_RECOVERY],
    )


def test_inside_another_run_the_outer_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(plugin.ACKNOWLEDGE, str(tmp_path / "outer.jsonl"))
    launch = Launch(("python", "s.py"))
    assert insight.watched(launch, tmp_path) is launch


def test_two_engines_of_one_model_differ_by_their_order(tmp_path):
    first = Launch(
        ("python", "s.py"),
        engine_models=("a",),
        engine_changes=(EngineChange("a", 2, {"max_model_len": 7}),),
    )
    got = start(vllm.apply(first, {"max_model_len": 7}, tmp_path), "a", "a", "a")
    assert [one["max_model_len"] for one in got] == [None, 7, None]


def test_each_engine_gets_its_own_change(tmp_path):
    changes = (
        EngineChange("a", None, {"max_model_len": 7}),
        EngineChange("b", None, {"max_model_len": 9}),
    )
    first = Launch(("python", "s.py"), engine_models=("a", "b"), engine_changes=changes)
    got = start(vllm.apply(first, {"max_model_len": 9}, tmp_path), "b", "a", "c")
    assert [one["max_model_len"] for one in got] == [9, 7, None]


def test_unreadable_changes_change_and_raise_nothing(subtests, tmp_path):
    for raw in [
        "",
        "{}",
        "[1]",
        '[{"model": "a"}]',
        "x",
        '[{"model": 1, "order": 1, "overrides": 1}]',
    ]:
        with subtests.test(raw=raw):
            launch = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path)
            broken = Launch(launch.argv, {**launch.env, plugin.ENGINES: raw})
            assert start(broken, "a")[0]["max_model_len"] is None


def test_wrong_report_request_reports_little_and_raises_nothing(subtests, tmp_path):
    for raw in ["", "{}", "x", '["a b", "_x", 1, "model"]']:
        with subtests.test(raw=raw):
            launch = insight.watched(Launch(("python", "s.py")), tmp_path)
            assert (
                start(Launch(launch.argv, {**launch.env, plugin.REPORT: raw}), "a")[0]["model"]
                == "a"
            )


def test_a_report_that_cannot_be_read_loses_no_change(subtests, tmp_path):
    for raw in ["x", "{}", "[" * 9000]:
        with subtests.test(raw=raw):
            launch = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path)
            assert (
                start(Launch(launch.argv, {**launch.env, plugin.REPORT: raw}), "a")[0][
                    "max_model_len"
                ]
                == 7
            )


def test_an_argument_that_cannot_be_compared_loses_no_change(tmp_path):
    code = (
        "import fake_vllm; fake_vllm.install(); from oomguard.engines.vllm.plugin import register; register()\n"
        "class Odd:\n    def __ne__(self, other): raise RuntimeError\n"
        "args = fake_vllm.EngineArgs(enforce_eager=Odd()); print(args.create_engine_config()['max_model_len'])"
    )
    launch = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, tmp_path)
    path = os.pathsep.join([str(FAKE.parent), str(FAKE.parents[3])])
    env = {**os.environ, **launch.env, "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["7"]


def test_lines_that_are_none_are_left_out(tmp_path):
    path = tmp_path / "told.jsonl"
    rows = [
        "",
        "x",
        "[]",
        '{"pid": "x"}',
        '{"pid": 1, "order": 1, "model": "a", "config": {"max_model_len": 5, "z": [1]}}',
    ]
    path.write_text("\n".join(rows))
    (told,) = reported_engines(path)
    assert (told.model, told.in_effect, told.arguments) == ("a", {"max_model_len": 5}, None)
    assert reported_engines(tmp_path / "none") == ()
