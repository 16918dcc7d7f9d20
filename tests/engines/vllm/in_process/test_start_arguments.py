"""The arguments of a start: what the program gave is read and left alone, and only what is changed differs."""

from __future__ import annotations

import dataclasses
import sys
import threading
import types
from typing import Any

import pytest

from oomguard.core.facts import Fact
from oomguard.engines.vllm.in_process.start import StartArguments


@dataclasses.dataclass
class EngineArgs:
    """The kinds of fields that vLLM's arguments have."""

    model: str = "org/model"
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    cpu_offload_gb: float = 0
    enforce_eager: bool = False
    hf_token: str | None = None
    speculative_config: dict[str, Any] | None = None
    compilation_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    lock: Any = None


def from_engine_args(
    engine_args: EngineArgs, usage_context: str = "engine", *, stat_loggers: object = None
) -> None:
    """Stand for the call that starts an engine."""


def start(*args: object, **kwargs: object) -> StartArguments:
    return StartArguments(from_engine_args, args, kwargs)


def test_a_change_goes_into_a_copy_and_all_else_stays(subtests):
    for by_name in [True, False]:
        with subtests.test(by_name=by_name):
            loggers = object()
            given = EngineArgs("./tiny", 32768, compilation_config={"mode": 3})
            made = (
                start(engine_args=given, stat_loggers=loggers)
                if by_name
                else start(given, "llm", stat_loggers=loggers)
            )
            assert (made.call({})[1].get("engine_args") or made.call({})[0][0]) is given
            given.max_model_len, given.compilation_config["sizes"] = (
                7,
                [1],
            )  # as vLLM does while it starts
            args, kwargs = made.call({"max_model_len": 1792})
            changed = kwargs.pop("engine_args") if by_name else args[0]
            assert changed == EngineArgs("./tiny", 1792, compilation_config={"mode": 3})
            assert kwargs == {"stat_loggers": loggers}
            assert args == (() if by_name else (changed, "llm"))
            assert given.max_model_len == 7


def test_each_attempt_begins_with_what_the_program_gave():
    made = start(EngineArgs(max_model_len=32768))
    (first,), _ = made.call({"max_model_len": 4096})
    first.compilation_config["sizes"] = [1]
    (second,), _ = made.call({"enforce_eager": True})
    assert (second.max_model_len, second.enforce_eager, second.compilation_config) == (
        32768,
        True,
        {},
    )


def test_a_value_is_given_in_the_engines_own_unit():
    (changed,), _ = start(EngineArgs()).call({"cpu_offload_bytes": 3 << 30})
    assert changed.cpu_offload_gb == 3


def test_a_value_that_does_not_fit_its_argument_is_refused():
    with pytest.raises(TypeError):
        start(EngineArgs()).call({"enforce_eager": "no"})


def test_difference_from_defaults_is_the_programs_choice():
    settings = start(
        EngineArgs("./tiny", 32768, hf_token="secret", kv_cache_memory_bytes=5)
    ).settings_in_force()
    assert {name: one.value for name, one in settings.items()} == {
        "model": "./tiny",
        "max_model_len": 32768,
        "kv_cache_memory_bytes": 5,
    }
    assert all(one.set_by_user for one in settings.values())


def test_only_settings_that_the_arguments_have_are_carried():
    made = start(EngineArgs())
    assert made.carries("max_model_len")
    assert not made.carries("max_num_seqs")
    assert not made.carries("batch_size")


def test_call_without_engine_arguments_is_unchanged():
    made = StartArguments(lambda vllm_config: None, ({"max_model_len": 1},), {"log_stats": True})
    assert made.call({}) == (({"max_model_len": 1},), {"log_stats": True})
    assert not made.carries("max_model_len")
    assert made.settings_in_force() == {}
    for args in ((), (None,), (EngineArgs,), ({},)):
        assert not StartArguments(from_engine_args, args, {}).carries("max_model_len")


def test_what_cannot_be_copied_is_shared():
    lock = threading.Lock()
    (changed,), _ = start(EngineArgs(lock=lock)).call({"max_model_len": 1})
    assert changed.lock is lock


def test_the_version_is_the_loaded_vllms_without_its_local_part(monkeypatch):
    module = types.ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert start(EngineArgs()).version is None
    module.__version__ = "0.32.0+cpu"  # type: ignore[attr-defined]
    assert start(EngineArgs()).version == "0.32.0"
    module.__version__ = "dev"  # type: ignore[attr-defined]
    assert start(EngineArgs()).version is None


def test_variable_that_overrides_an_argument_is_reported(monkeypatch):
    facts = {"on_cpu": Fact("on_cpu", True, "printed")}
    made = start(EngineArgs())
    assert made.beaten_by("kv_cache_memory_bytes", facts) is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    over = made.beaten_by("kv_cache_memory_bytes", facts)
    assert over is not None
    assert (over.value, over.source) == (4 << 30, "VLLM_CPU_KVCACHE_SPACE=4")
    assert made.beaten_by("kv_cache_memory_bytes", {}) is None
