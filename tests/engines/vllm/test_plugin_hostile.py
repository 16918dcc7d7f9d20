"""Inside the user's vLLM the plugin raises nothing, waits for nothing, and changes only what it was computed for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.facts import Fact
from oomguard.core.incident import Incident
from oomguard.engines.command import Launch, with_failed_engine
from oomguard.engines.vllm import launch as vllm
from oomguard.engines.vllm import plugin

FAKE = Path(__file__).with_name("fake_vllm.py")
LIMIT_S = 60
DEFAULTS = {
    "model": "org/model",
    "max_model_len": None,
    "gpu_memory_utilization": 0.92,
    "max_num_seqs": None,
    "enforce_eager": False,
    "kv_cache_dtype": "auto",
    "cpu_offload_gb": 0,
    "limit_mm_per_prompt": {},
    "speculative_config": None,
    "cudagraph_capture_sizes": None,
}


def start(*models: str, shape: str = "sync", **variables: str) -> list[dict[str, Any]]:
    """Start engines in a process whose environment has these variables of ours; what they got, in order."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OOMGUARD_")}
    named = {getattr(plugin, name): value for name, value in variables.items()}
    ran = subprocess.run(
        [sys.executable, str(FAKE), shape, *(models or ("org/model",))],
        env={**env, **named, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_change_reaches_the_arguments_of_both_front_ends(subtests, tmp_path):
    for shape in ["sync", "async"]:
        with subtests.test(shape=shape):
            told = tmp_path / f"{shape}.jsonl"
            overrides = json.dumps(
                {"max_model_len": 7, "enforce_eager": True, "gpu_memory_utilization": 0.5}
            )

            (got,) = start(shape=shape, OVERRIDES=overrides, ACKNOWLEDGE=str(told))

            assert (got["max_model_len"], got["enforce_eager"], got["gpu_memory_utilization"]) == (
                7,
                True,
                0.5,
            )
            (line,) = told.read_text().splitlines()
            assert json.loads(line)["applied"] == json.loads(overrides)


def test_invalid_overrides_change_and_raise_nothing(subtests, tmp_path):
    for raw in [
        "[1]",
        '"x"',
        "null",
        "1",
        "true",
        "not json",
        "",
        "\x01",
        '{"__class__": {"a": 1}, "__init__": 1, "__dict__": "x", "__dataclass_fields__": 1}',
        '{"create_engine_config": 1}',
        '{"nothing_of_this_name": 1, "": 2}',
        '{"max_model_len": {"a": 1}, "max_num_seqs": [1], "kv_cache_dtype": null}',
        '{"gpu_memory_utilization": "0.5", "enforce_eager": 1, "cpu_offload_gb": true, "kv_cache_dtype": false}',
        '{"gpu_memory_utilization": NaN, "cpu_offload_gb": Infinity, "max_model_len": -Infinity}',
        '{"limit_mm_per_prompt": "image=1", "limit_mm_per_prompt": 3}',
        '{"limit_mm_per_prompt": "{", "speculative_config": "{1}"}',
        '{"max_model_len": 1' + "0" * 5000 + "}",
        "[" * 60_000,
        '{"max_model_len": 7, "x": "' + "x" * 100_000 + '"}',
    ]:
        with subtests.test(raw=raw):
            told = tmp_path / "told.jsonl"

            assert start(OVERRIDES=raw, ACKNOWLEDGE=str(told)) == [DEFAULTS]
            assert not told.exists()


def test_one_value_that_cannot_be_set_leaves_the_others(tmp_path):
    overrides = '{"enforce_eager": "yes", "max_num_seqs": 3}'

    (got,) = start(OVERRIDES=overrides, ACKNOWLEDGE=str(tmp_path / "told"))

    assert (got["enforce_eager"], got["max_num_seqs"]) == (False, 3)
    assert json.loads((tmp_path / "told").read_text())["applied"] == {"max_num_seqs": 3}


def test_what_is_text_on_the_command_line_is_an_object_in_python():
    (got,) = start(
        OVERRIDES=json.dumps(
            {"limit_mm_per_prompt": '{"image": 0}', "speculative_config": '{"method": "ngram"}'}
        )
    )

    assert (got["limit_mm_per_prompt"], got["speculative_config"]) == (
        {"image": 0},
        {"method": "ngram"},
    )


def test_arguments_of_another_shape_are_left_as_they_are():
    assert start(shape="plain", OVERRIDES='{"max_model_len": 7}') == [{"max_model_len": 8192}]


class Refusing:
    """No dataclass of ours: attributes that raise whatever is done to them."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_arguments_that_raise_when_touched_raise_nothing_here(monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
    calls = []

    class EngineArgs(Refusing):
        def create_engine_config(self) -> str:
            calls.append(self)
            return "the engine's own"

    import types

    module = types.ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = EngineArgs
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    plugin.register()

    assert EngineArgs().create_engine_config() == "the engine's own"
    assert len(calls) == 1


IN_ITS_PLACE: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "full device": lambda path: path.symlink_to("/dev/full"),
    "link": lambda path: path.symlink_to(path.with_name("victim")),
    "unwritable": lambda path: path.touch(0o400),
}


def test_engine_starts_whatever_is_at_the_acknowledgement(subtests, tmp_path):
    for kind, value in IN_ITS_PLACE.items():
        with subtests.test(kind=kind):
            folder = tmp_path / kind
            folder.mkdir()
            value(folder / "told")

            (got,) = start(OVERRIDES='{"max_model_len": 7}', ACKNOWLEDGE=str(folder / "told"))

            assert got["max_model_len"] == 7
            assert not (folder / "victim").exists()


def test_a_device_is_not_written_to(subtests):
    for path in ["/dev/full", "/dev/null"]:
        with subtests.test(path=path):
            (got,) = start(OVERRIDES='{"max_model_len": 7}', ACKNOWLEDGE=path)

            assert got["max_model_len"] == 7


def test_a_full_disk_is_no_matter(monkeypatch, tmp_path):
    monkeypatch.setenv(plugin.ACKNOWLEDGE, str(tmp_path / "told"))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plugin.os, "write", full)
    plugin.acknowledge({"max_model_len": 7})


def test_an_acknowledgement_does_not_grow_for_ever(monkeypatch, tmp_path):
    (tmp_path / "told").write_bytes(b"x" * (1 << 20))
    monkeypatch.setenv(plugin.ACKNOWLEDGE, str(tmp_path / "told"))
    plugin.acknowledge({"max_model_len": 7})

    assert (tmp_path / "told").stat().st_size == 1 << 20


@given(raw=st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
@settings(max_examples=100)
def test_any_text_is_parsed_or_refused_and_nothing_is_raised(raw):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin.os, "environ", {plugin.OVERRIDES: raw})
        plugin.register()


# What the variables reach.


def models(*names: str) -> str:
    return json.dumps(names)


def test_only_engines_of_the_models_that_failed_are_changed():
    got = start(
        "org/embedding",
        "org/model",
        "org/embedding",
        OVERRIDES='{"max_model_len": 7}',
        MODELS=models("org/model"),
    )

    assert [one["max_model_len"] for one in got] == [None, 7, None]


def test_model_named_by_its_cache_folder_is_known():
    folder = "/home/u/.cache/huggingface/hub/models--org--model/snapshots/" + "a" * 40

    (got, other) = start(
        "org/model", "org/other", OVERRIDES='{"max_model_len": 7}', MODELS=models(folder)
    )

    assert (got["max_model_len"], other["max_model_len"]) == (7, None)


def test_a_folder_is_the_same_by_any_path(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "link").symlink_to("tiny")

    (got,) = start(
        str(tmp_path / "link"),
        OVERRIDES='{"max_model_len": 7}',
        MODELS=models(str(tmp_path / "tiny")),
    )

    assert got["max_model_len"] == 7


def test_models_that_cannot_be_read_are_none(subtests):
    for raw in ["", "{}", "[1]", "null", "x"]:
        with subtests.test(raw=raw):
            assert start(OVERRIDES='{"max_model_len": 7}', MODELS=raw) == [DEFAULTS]


def test_engine_started_after_its_attempt_is_not_changed(tmp_path):
    session = tmp_path / "session"
    session.mkdir()
    first = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 7}, session)
    told = first.env[plugin.ACKNOWLEDGE]
    during = start(OVERRIDES='{"max_model_len": 7}', ACKNOWLEDGE=told)
    assert vllm.took_effect(first, session)
    second = vllm.apply(Launch(("python", "s.py")), {"max_model_len": 6}, session)
    after = start(OVERRIDES='{"max_model_len": 7}', ACKNOWLEDGE=told)

    assert during[0]["max_model_len"] == 7
    assert after == [DEFAULTS]
    assert not vllm.took_effect(second, session)


def test_the_models_whose_engines_failed_are_told_to_the_plugin(tmp_path):
    failed = [
        Incident(
            "cuda_oom",
            "",
            facts={"model": Fact("model", name, "printed")},
            framework_version="0.32.0",
        )
        for name in ("a/one", "b/two", "a/one")
    ]
    launch = Launch(("python", "s.py"))
    for incident in failed:
        launch = with_failed_engine(launch, incident)

    assert (launch.engine_models, launch.engine_version) == (("a/one", "b/two"), "0.32.0")
    assert json.loads(vllm.apply(launch, {"max_model_len": 7}, tmp_path).env[plugin.MODELS]) == [
        "a/one",
        "b/two",
    ]


def test_every_engine_is_changed_if_none_printed_its_model(tmp_path):
    launch = with_failed_engine(
        Launch(("python", "s.py"), engine_models=("a/one",)), Incident("cuda_oom", "")
    )

    assert plugin.MODELS not in vllm.apply(launch, {"max_model_len": 7}, tmp_path).env
