"""What the code that a model runs keeps outside of it: in variables of its module, of a function around it, of its class.

A call that changes such a value is not made in parts: each part would change it once more. What following a call has changed is
put back, as fake tensors are for nobody else.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.transformers.held_state import (
    PLAIN,
    get_at,
    inside,
    is_module,
    is_same,
    put_back,
    set_at,
    state,
)
from oomguard.engines.transformers.own_code import is_library, own_functions
from oomguard.engines.transformers.tensors import is_tensor

ARGUMENT: Final = "its argument"
_DEEPEST: Final = 3
_DEEPEST_GIVEN: Final = 6
_MOST_PLACES: Final = 1 << 14


@dataclass(slots=True)
class _Place:
    """One variable: where it is, what it was, and a copy of what it held."""

    name: str
    owner: Any
    key: Any
    value: Any
    copy: Any
    version: int | None


class KeptOutside:
    """What a model's own code keeps outside of the model, and what its arguments hold, as it is now.

    Args:
        model: the model; None: only its arguments.
        arguments: those of a call of it, by name.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._places: list[_Place] = []
        self._seen: set[int] = set()
        self._noted: set[tuple[int, Any]] = set()
        for _, function in own_functions(model) if model is not None else ():
            self._look_at(function, _DEEPEST)
        self._given = dict(arguments or {})
        for name, value in self._given.items():
            of_library = is_library(type(value).__module__) and not isinstance(value, functools.partial)
            if not (is_tensor(value) or is_module(value) or of_library):
                self._note(f"{ARGUMENT} {name}", self._given, name, value, _DEEPEST_GIVEN)

    def changed(self) -> str | None:
        """Return the first variable that is not what it was; None without one."""
        return next((place.name for place in self._places if not _is_as_it_was(place)), None)

    def put_back(self) -> None:
        """Give each variable what it held, as far as that can be done."""
        for place in self._places:
            if _is_as_it_was(place):
                continue
            if get_at(place.owner, place.key) is not place.value:
                set_at(place.owner, place.key, place.value)
            put_back(place.value, place.copy)

    def _look_at(self, function: types.FunctionType, depth: int) -> None:
        if id(function) in self._seen or depth < 0:
            return
        self._seen.add(id(function))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=False):
            try:
                self._note(name, cell, None, cell.cell_contents, depth)
            except ValueError:  # a cell that is empty yet
                continue
        for name in _names(function.__code__):
            if name in function.__globals__:
                self._note(name, function.__globals__, name, function.__globals__[name], depth)

    def _note(self, name: str, owner: Any, key: Any, value: Any, depth: int) -> None:
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)):
            self._note_called(name, value, depth)
            return
        if isinstance(value, types.ModuleType) or (id(owner), key) in self._noted or len(self._places) > _MOST_PLACES:
            return
        self._noted.add((id(owner), key))
        version = value._version if is_tensor(value) and not value.is_inference() else None
        self._places.append(_Place(name, owner, key, value, state(value), version))
        if depth > 0 and id(value) not in self._seen:
            self._seen.add(id(value))
            for called, inner, entry in inside(value):
                self._note(name + called, value, inner, entry, depth - 1)

    def _note_called(self, name: str, value: Any, depth: int) -> None:
        """Note what a function of the user's own keeps, and what the object holds that it belongs to."""
        if isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._note(name, {None: each}, None, each, depth)
            return
        function: Any = getattr(value, "__func__", value)
        if not is_library(function.__module__):
            bound = getattr(value, "__self__", None)
            if isinstance(function, types.FunctionType):
                self._look_at(function, depth - 1)
            if bound is not None and not is_module(bound):
                self._note(name, {None: bound}, None, bound, depth)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_as_it_was(place: _Place) -> bool:
    now = get_at(place.owner, place.key)
    if now is not place.value:
        return isinstance(now, PLAIN) and type(now) is type(place.value) and bool(now == place.value)
    if is_tensor(now):
        return place.version is None or now.is_inference() or now._version == place.version
    return is_same(state(now), place.copy)
