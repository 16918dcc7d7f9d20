"""What the code that a model runs keeps outside of it: in variables of its module, of a function around it, of its class.

A call that changes such a value is not made in parts: each part would change it once more. What following a call has changed is
put back, as fake tensors are for nobody else.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.engines.transformers.held_state import (
    PLAIN,
    get_at,
    inside,
    is_module,
    is_own_module,
    is_same,
    put_back,
    set_at,
    state,
)
from oomguard.engines.transformers.named_values import named_values
from oomguard.engines.transformers.own_code import OF_CLASS, is_library, own_values
from oomguard.engines.transformers.own_code import inside as called_by
from oomguard.engines.transformers.tensors import is_tensor

ARGUMENT: Final = "its argument"
_DEEPEST: Final = 3
_DEEPEST_GIVEN: Final = 6
_MOST_PLACES: Final = 1 << 14
_MOST_TENSOR_BYTES: Final = 1 << 12
# What may be called, and holds a function.
_CALLED: Final = (*OF_CLASS, types.MethodType, types.BuiltinMethodType, functools._lru_cache_wrapper)


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
        for name, value in own_values(model) if model is not None else ():
            self._note_called(name, value, _DEEPEST + 1)
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
        """Note what the code of a function names, what its arguments have as defaults, and its attributes."""
        if id(function) in self._seen or depth < 0:
            return
        self._seen.add(id(function))
        for name, owner, key, value in named_values(function):
            # A module's class that stands there for ``super()`` alone is not named by the program.
            if name != "__class__" or not hasattr(value, "named_modules"):
                self._note(name, owner, key, value, depth)

    def _note(self, name: str, owner: Any, key: Any, value: Any, depth: int) -> None:
        if isinstance(value, _CALLED):
            self._note_called(name, value, depth)
            return
        is_foreign = isinstance(value, types.ModuleType) and not is_own_module(value)
        is_foreign = is_foreign or type(value).__module__ == "logging"  # which levels it was asked for
        if is_foreign or (id(owner), key) in self._noted or len(self._places) > _MOST_PLACES:
            return
        self._noted.add((id(owner), key))
        version = value._version if is_tensor(value) and not value.is_inference() else None
        held = _numbers_of(value) if is_tensor(value) else state(value)
        self._places.append(_Place(name, owner, key, value, held, version))
        if depth > 0 and id(value) not in self._seen:
            self._seen.add(id(value))
            for called, inner, entry in inside(value):
                self._note(name + called, value, inner, entry, depth - 1)
            self._look_at_class(value if isinstance(value, type) else type(value), depth - 1)

    def _look_at_class(self, kind: type, depth: int) -> None:
        """Note what the methods of a class of the user's own keep, and its metaclass."""
        for each in (kind, type(kind)):
            if id(each) in self._seen or not is_own_module(sys.modules.get(each.__module__)):
                continue
            if each is not kind:
                self._note(each.__name__, {None: each}, None, each, depth)
            for value in vars(each).values():
                if isinstance(value, _CALLED):
                    self._note_called(each.__name__, value, depth)

    def _note_called(self, name: str, value: Any, depth: int) -> None:
        """Note what a function of the user's own keeps, and what the object holds that it belongs to."""
        if isinstance(value, (functools.partial, functools.partialmethod)):
            for each in (value.func, value.args, value.keywords):
                self._note(name, {None: each}, None, each, depth)
            return
        inner = called_by(value)
        function = value if inner is None else inner
        if function is not value and not isinstance(function, types.FunctionType):
            self._note(name, {None: function}, None, function, depth)
        if not is_library(getattr(function, "__module__", None)):
            bound = getattr(value, "__self__", None)
            if isinstance(function, types.FunctionType):
                self._look_at(function, depth - 1)
            if bound is not None and not is_module(bound) and not isinstance(bound, types.ModuleType):
                self._note(name, {None: bound}, None, bound, depth)


def _numbers_of(tensor: Any) -> int | None:
    """Return a checksum of a small tensor of the host: what writes to its ``data`` counts no version."""
    is_plain = type(tensor).__module__ in ("torch", "torch.nn.parameter") and not tensor.is_quantized
    if (
        not is_plain
        or tensor.device.type != "cpu"
        or tensor.is_sparse
        or tensor.is_nested
        or tensor.nbytes > _MOST_TENSOR_BYTES
    ):
        return None
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return hash(str(tensor.detach().flatten().tolist()))


def _is_as_it_was(place: _Place) -> bool:
    now = get_at(place.owner, place.key)
    if now is not place.value:
        return isinstance(now, PLAIN) and type(now) is type(place.value) and bool(now == place.value)
    if is_tensor(now):
        is_old = place.version is None or now.is_inference() or now._version == place.version
        return is_old and (place.copy is None or place.copy == _numbers_of(now))
    return is_same(state(now), place.copy)
