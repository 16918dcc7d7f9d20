"""What the code that a model runs keeps outside of it: in variables of its module, of a function around it, of its class.

A call that changes such a value is not made in parts: each part would change it once more. What following a call has changed is
put back, as fake tensors are for nobody else.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.transformers.own_code import is_library, own_functions

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS: Final = (list, dict, set, collections.deque)
_DEEPEST: Final = 3
_MOST_ENTRIES: Final = 4096


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
    """What a model's own code keeps outside of the model, as it is now."""

    def __init__(self, model: Any) -> None:
        self._places: list[_Place] = []
        self._seen: set[int] = set()
        self._noted: set[tuple[int, Any]] = set()
        for _, function in own_functions(model):
            self._look_at(function, _DEEPEST)

    def changed(self) -> str | None:
        """Return the first variable that is not what it was; None without one."""
        return next((place.name for place in self._places if not _is_as_it_was(place)), None)

    def put_back(self) -> None:
        """Give each variable what it held, as far as that can be done."""
        for place in self._places:
            if _is_as_it_was(place):
                continue
            _set(place.owner, place.key, place.value)
            if isinstance(place.value, (list, collections.deque)):
                place.value.clear()
                place.value.extend(place.copy)
            elif isinstance(place.value, (dict, set)):
                place.value.clear()
                place.value.update(place.copy)

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
        if isinstance(value, (types.FunctionType, types.MethodType)):
            function: Any = getattr(value, "__func__", value)
            if not is_library(function.__module__):
                self._look_at(function, depth - 1)
            return
        if isinstance(value, types.ModuleType) or (id(owner), key) in self._noted:
            return
        self._noted.add((id(owner), key))
        version = value._version if _tensor(value) and not value.is_inference() else None
        self._places.append(_Place(name, owner, key, value, _state(value), version))
        if depth > 0 and id(value) not in self._seen:
            self._seen.add(id(value))
            for called, inner, entry in _inside(value):
                self._note(name + called, value, inner, entry, depth - 1)


def _inside(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what an object of the user's own holds, by how it is called and where it is: containers and plain values."""
    if isinstance(value, dict):
        if len(value) <= _MOST_ENTRIES:
            yield from ((f"[{key!r}]", key, entry) for key, entry in value.items() if isinstance(entry, _CONTAINERS))
        return
    is_class = isinstance(value, type)
    if _tensor(value) or _is_module(value) or not hasattr(value, "__dict__"):
        return
    if is_class and (is_library(value.__module__) or value.__module__ == "builtins"):
        return
    for key, entry in list(vars(value).items()):
        if isinstance(entry, (*_PLAIN, *_CONTAINERS)) and not key.startswith("__"):
            yield f".{key}", key, entry


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _state(value: Any) -> Any:
    """Return what tells whether a value has changed, and can be put back where it is a container."""
    if isinstance(value, _CONTAINERS):
        return next(kind(value) for kind in (dict, set, list) if kind is list or isinstance(value, kind))
    if isinstance(value, (*_PLAIN, type)) or _tensor(value) or _is_module(value):
        return None
    if hasattr(value, "tell"):
        try:
            return value.tell()
        except Exception:  # noqa: BLE001 - a stream that tells nothing
            return None
    if hasattr(value, "__next__"):
        return repr(value), getattr(getattr(value, "gi_frame", None), "f_lasti", None)
    return None


def _is_as_it_was(place: _Place) -> bool:
    now = _get(place.owner, place.key)
    if now is not place.value:
        return isinstance(now, _PLAIN) and type(now) is type(place.value) and now == place.value
    if _tensor(now):
        return place.version is None or now.is_inference() or now._version == place.version
    state = _state(now)
    if isinstance(state, dict):
        return list(state) == list(place.copy) and all(state[key] is place.copy[key] for key in state)
    if isinstance(state, list):
        return len(state) == len(place.copy) and all(one is two for one, two in zip(state, place.copy, strict=True))
    return bool(state == place.copy)


def _get(owner: Any, key: Any) -> Any:
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    return owner.get(key) if isinstance(owner, dict) else vars(owner).get(key)


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, dict):
        owner[key] = value
    else:
        setattr(owner, key, value)


def _tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _is_module(value: Any) -> bool:
    return hasattr(value, "named_modules")
