"""The arguments of one start: what the program gave, and a copy of them with settings changed.

The program's own object goes into the first attempt and is left alone afterwards: vLLM writes into it while it starts.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from oomguard.engines.command import Launch
from oomguard.engines.vllm.environment import set_by_variable
from oomguard.engines.vllm.plugin import fitting, is_plain
from oomguard.engines.vllm.told import arguments_told, settings_of
from oomguard.facts import Fact, FactValue
from oomguard.incident import SettingInForce
from oomguard.observe.settings_in_force import ARGUMENTS
from oomguard.surfaces import surface

_ENGINE: Final = "vllm"
_NAME: Final = "engine_args"


class StartArguments:
    """The arguments of one call that starts an engine.

    Args:
        function: the call's function; it tells which argument holds those of the engine.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, dict(kwargs)
        self._position = _position(function, args, kwargs)
        given = self._given()
        self._is_known = dataclasses.is_dataclass(given) and not isinstance(given, type)
        self._first = _copied(given) if self._is_known else None
        self.version = _version()

    def call(self, changed: Mapping[str, FactValue]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments: the program's own, where nothing is changed.

        Raises:
            TypeError: a value does not fit its argument.
        """
        if not changed:
            return self._args, self._kwargs
        arguments = _copied(self._first)
        for name, value in changed.items():
            own = surface(name, _ENGINE, self.version)
            if own.kwarg is not None:
                setattr(arguments, own.kwarg, fitting(getattr(arguments, own.kwarg), own.own(value)))
        if isinstance(self._position, int):
            before, behind = self._args[: self._position], self._args[self._position + 1 :]
            return (*before, arguments, *behind), dict(self._kwargs)
        return self._args, {**self._kwargs, _NAME: arguments}

    def settings_in_force(self) -> dict[str, SettingInForce]:
        """Return what differs from the engine's defaults, as canonical settings; empty where the call has no arguments to read."""
        if not self._is_known:
            return {}
        names = set(arguments_told())
        told = {
            f.name: value
            for f in dataclasses.fields(self._first)  # type: ignore[arg-type]
            if f.name in names and is_plain(value := getattr(self._first, f.name)) and value != f.default
        }
        model = getattr(self._first, "model", None)
        found = {"model": model} if isinstance(model, str) else {}
        known: dict[str, FactValue] = {**found, **settings_of(told)}
        return {name: SettingInForce(name, value, True, ARGUMENTS) for name, value in known.items()}

    def carries(self, name: str) -> bool:
        """Return whether the engine's arguments have a field for a setting."""
        own = surface(name, _ENGINE, self.version)
        return self._is_known and own.kwarg in {f.name for f in dataclasses.fields(self._first)}  # type: ignore[arg-type]

    def beaten_by(self, name: str, facts: Mapping[str, Fact]) -> SettingInForce | None:
        """Return the variable that sets a setting over the argument; None where none does."""
        return set_by_variable(Launch((sys.executable,)), name, facts, os.environ)

    def _given(self) -> Any:
        if isinstance(self._position, int):
            return self._args[self._position]
        return self._kwargs.get(_NAME)


def _position(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return where the engine's arguments stand among the positional ones; None where they do not."""
    if _NAME in kwargs:
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    place = names.index(_NAME) if _NAME in names else None
    return place if place is not None and place < len(args) else None


def _copied(arguments: Any) -> Any:
    """Return a copy that vLLM may write into; a field that cannot be copied is shared."""
    made = copy.copy(arguments)
    for one in dataclasses.fields(arguments):
        value = getattr(arguments, one.name)
        if is_plain(value) or value is None:
            continue
        with contextlib.suppress(Exception):  # whatever an object of the program's raises: it stays as it is
            setattr(made, one.name, copy.deepcopy(value))
    return made


def _version() -> str | None:
    """Return the version of the vLLM that is loaded, without its local part; None where it tells none."""
    found = getattr(sys.modules.get("vllm"), "__version__", None)
    return found.partition("+")[0] if isinstance(found, str) and found[:1].isdigit() else None
