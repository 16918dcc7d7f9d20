"""What a value of the user's own holds, so that a change of it is told and put back: entries, attributes, numbers of an array."""

from __future__ import annotations

import collections
import contextvars
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from oomguard.engines.transformers.held_bytes import bytes_in, is_kept, stands_at
from oomguard.engines.transformers.held_bytes import put_back as restored
from oomguard.engines.transformers.own_code import is_library
from oomguard.engines.transformers.tensors import is_tensor

PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS: Final = (list, dict, set, collections.deque)
_MOST_ENTRIES: Final = 4096
# Larger arrays are told by a checksum, and are not put back.
_MOST_BYTES: Final = 1 << 24
_GONE: Final = object()
_INSTALLED: Final = ("site-packages", "dist-packages")


def inside(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what a value holds that may be changed in its place, by how it is called and where it is."""
    if isinstance(value, _CONTAINERS) and len(value) > _MOST_ENTRIES:
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", key, entry) for key, entry in list(value.items()) if _may_change(entry))
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from ((f"[{place}]", place, entry) for place, entry in enumerate(list(value)) if _may_change(entry))
    is_class = isinstance(value, type)
    if is_tensor(value) or is_module(value) or (is_class and _is_foreign(value)):
        return
    for key, entry in attributes(value).items():
        if isinstance(entry, PLAIN) or _may_change(entry):
            yield f".{key}", key, entry


def state(value: Any) -> Any:
    """Return what tells whether a value has changed, and can be put back where it is a container, an object or an array."""
    if isinstance(value, _CONTAINERS):
        return next(kind(value) for kind in (dict, set, list) if kind is list or isinstance(value, kind))
    if isinstance(value, (*PLAIN, type)) or is_tensor(value) or is_module(value):
        return None
    if isinstance(value, contextvars.ContextVar):
        return {None: value.get(_GONE)}
    if _is_array(value):
        return _numbers(value)
    if (held := bytes_in(value)) is not None:
        return held
    return stands_at(value) or (attributes(value) if _is_object(value) or is_own_module(value) else None)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states, or values, are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_is_entry(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_entry, one, other))
    if _is_array(one) or _is_array(other):
        return bool(type(one) is type(other) and _numbers(one, whole=False) == _numbers(other, whole=False))
    return bool(one == other)


def put_back(value: Any, before: Any) -> None:
    """Give a value what it held."""
    if isinstance(value, (list, collections.deque)):
        value.clear()
        value.extend(before)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
    elif isinstance(value, contextvars.ContextVar):
        if before[None] is not _GONE:
            value.set(before[None])
    elif isinstance(before, (bytes, tuple)) and restored(value, before):
        return
    elif _is_array(value) and _is_array(before) and value.shape == before.shape:
        value[...] = before
    elif isinstance(before, dict):
        for key in attributes(value).keys() - before.keys():
            delattr(value, key)
        for key, entry in before.items():
            set_at(value, key, entry)


def get_at(owner: Any, key: Any) -> Any:
    """Return what is at a place: in a cell, under a key, or an attribute."""
    if isinstance(owner, types.CellType):
        return owner.cell_contents
    if isinstance(owner, (list, tuple, collections.deque)) and isinstance(key, int):
        return owner[key] if key < len(owner) else _GONE
    if isinstance(owner, dict) and key in owner:
        return owner[key]
    return attributes(owner).get(key, _GONE) if isinstance(key, str) else _GONE


def set_at(owner: Any, key: Any, value: Any) -> None:
    """Put a value at a place."""
    if isinstance(owner, types.CellType):
        owner.cell_contents = value
    elif isinstance(owner, tuple):
        return
    elif isinstance(owner, (dict, list, collections.deque)) and not (isinstance(key, str) and key in attributes(owner)):
        if not isinstance(owner, dict) and key >= len(owner):
            return
        owner[key] = value
    else:
        setattr(owner, key, value)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object: of its dict, and of its slots."""
    found = {key: entry for key, entry in dict(getattr(value, "__dict__", {})).items() if not key.startswith("__")}
    if isinstance(value, type):
        return found
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and (entry := getattr(value, name, _GONE)) is not _GONE:
                found[name] = entry
    return found


def is_module(value: Any) -> bool:
    """Return whether a value is a module of torch."""
    return hasattr(value, "named_modules") and not isinstance(value, type)


def is_own_module(value: Any) -> bool:
    """Return whether a value is a module of the user's own code: of no package that is installed."""
    if not isinstance(value, types.ModuleType) or value.__name__.partition(".")[0] in sys.stdlib_module_names:
        return False
    file = getattr(value, "__file__", None)
    return (
        bool(file) and not is_library(value.__name__) and not any(each in Path(str(file)).parts for each in _INSTALLED)
    )


def _may_change(entry: Any) -> bool:
    if isinstance(entry, (*_CONTAINERS, contextvars.ContextVar)) or _is_array(entry) or is_tensor(entry):
        return True
    return is_kept(entry) or _is_object(entry)


def _is_object(value: Any) -> bool:
    """Return whether a value is an object of no library, with attributes."""
    is_code = isinstance(value, (type, types.ModuleType, types.FunctionType, types.MethodType))
    if is_code or isinstance(value, PLAIN) or is_tensor(value) or is_module(value):
        return False
    return not _is_foreign(type(value)) and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def _is_foreign(kind: type) -> bool:
    return is_library(kind.__module__) or kind.__module__.partition(".")[0] in ("builtins", "logging", "re", "weakref")


def _is_entry(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "setflags")


def _numbers(array: Any, *, whole: bool = True) -> Any:
    """Return a copy of an array, or what tells its numbers."""
    if not array.flags.writeable:
        return None
    if whole and array.nbytes <= _MOST_BYTES:
        return array.copy()
    return (array.shape, zlib.crc32(repr(array).encode() if array.dtype.hasobject else array.tobytes()))
