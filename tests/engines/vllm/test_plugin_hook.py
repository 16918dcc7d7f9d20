"""The plugin hooks what it was verified on, and nothing else: of another shape the engine's own code stays as it is."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from oomguard.engines.vllm import plugin


@pytest.fixture
def engine_args(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type]:
    """Put a class of engine arguments in vLLM's place, with what stands where the hook would go."""

    def put(**members: object) -> type:
        fields = [("model", str, "org/model"), ("max_model_len", int, 8192)]
        made = dataclasses.make_dataclass("EngineArgs", fields, namespace=members)
        module = types.ModuleType(plugin.HOOK[0])
        module.EngineArgs = made  # type: ignore[attr-defined]
        for name in ("vllm", "vllm.engine"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, plugin.HOOK[0], module)
        return made

    return put


def length(arguments: Any, *_: object, **__: object) -> int:
    return arguments.max_model_len


def test_the_verified_shape_is_hooked(engine_args, monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
    made = engine_args(create_engine_config=length)
    plugin.register()

    assert made().create_engine_config() == 7


async def later(arguments: Any) -> int:
    return arguments.max_model_len


OTHERS: dict[str, tuple[object, Callable[[Any], object]]] = {
    "a class's method": (
        classmethod(lambda cls, arguments: arguments.max_model_len),
        lambda a: a.create_engine_config(a),
    ),
    "a static method": (
        staticmethod(lambda arguments: arguments.max_model_len),
        lambda a: a.create_engine_config(a),
    ),
    "a property": (property(length), lambda a: a.create_engine_config),
    "a coroutine": (later, lambda a: asyncio.run(a.create_engine_config())),
    "an object that is called": (
        functools.partial(lambda: 8192),
        lambda a: a.create_engine_config(),
    ),
}


def test_what_is_no_plain_method_is_left_as_it_is_and_said(
    subtests, engine_args, monkeypatch, caplog
):
    for kind, value in OTHERS.items():
        with subtests.test(kind=kind):
            caplog.clear()
            monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
            other, call = value
            made = engine_args(create_engine_config=other)
            plugin.register()

            assert inspect.getattr_static(made, "create_engine_config") is other
            assert call(made()) == 8192
            assert (
                "oomguard did not change vLLM's arguments: TypeError: EngineArgs.create_engine_config is not a plain method"
                in caplog.text
            )


def test_a_method_that_is_gone_is_said(engine_args, monkeypatch, caplog):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
    made = engine_args(make_engine_config=length)
    plugin.register()

    assert made().make_engine_config() == 8192
    assert not hasattr(made, "create_engine_config")
    assert "oomguard did not change vLLM's arguments" in caplog.text


def test_a_class_that_is_gone_is_said(engine_args, monkeypatch, caplog):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
    engine_args(create_engine_config=length)
    del sys.modules[plugin.HOOK[0]].EngineArgs
    plugin.register()

    assert "oomguard did not change vLLM's arguments: AttributeError" in caplog.text


def test_arguments_that_a_newer_version_adds_are_passed_on(engine_args, monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')

    def create(
        self: Any, usage_context: object = None, *, headless: bool = False, mode: str
    ) -> tuple[object, ...]:
        return self.max_model_len, usage_context, headless, mode

    made = engine_args(create_engine_config=create)
    plugin.register()

    assert made().create_engine_config("server", headless=True, mode="x") == (
        7,
        "server",
        True,
        "x",
    )


def test_another_plugin_s_wrapper_is_hooked_around(engine_args, monkeypatch):
    monkeypatch.setenv(plugin.OVERRIDES, '{"max_model_len": 7}')
    made = engine_args(create_engine_config=lambda *args, **kwargs: length(*args, **kwargs) + 1)
    plugin.register()

    assert made().create_engine_config() == 8


def test_where_only_a_report_is_asked_for_nothing_is_said(
    subtests, engine_args, monkeypatch, caplog
):
    for name, members in [
        ("gone", {}),
        ("another kind", {"create_engine_config": classmethod(length)}),
    ]:
        with subtests.test(name):
            monkeypatch.delenv(plugin.OVERRIDES, raising=False)
            monkeypatch.setenv(plugin.REPORT, '["max_model_len"]')
            engine_args(**members)
            plugin.register()

            assert caplog.text == ""
