"""What a function does and reads: its code, that of the helpers in its module, and the values that they read from around them."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final

_STORES: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_ADDING: Final = ("add", "append", "appendleft", "extend", "insert", "setdefault", "update")
_TAKING: Final = ("clear", "discard", "pop", "popitem", "popleft", "remove")
_KEY_STEPS: Final = ("LOAD_", "BINARY_OP", "BUILD_")
Values = dict[str, Any]


class FunctionCode:
    """What is read of a function.

    Attributes:
        closed: what it closes over, and its arguments' defaults, by name; what it counts up itself, or writes into, is not among them.
        around: what it reads from its module.

    Args:
        function: the function.
        decorators: the functions that ``functools.wraps`` made of it; those of other modules count by what they close over.
    """

    def __init__(self, function: types.FunctionType, decorators: Iterable[types.FunctionType] = ()) -> None:
        self.closed: Values = {}
        self.around: Values = {}
        self._code, self._seen = blake2b(digest_size=16), {function, *decorators}
        self._read(function)
        for decorator in decorators:
            if decorator.__globals__ is function.__globals__:
                self._read(decorator)
            else:
                self._take(self.closed, _closed(decorator), decorator)

    @property
    def digest(self) -> str:
        """The digest of all the code."""
        return self._code.hexdigest()

    def _read(self, function: types.FunctionType) -> None:
        self._code.update(_told(function))
        self._take(self.closed, _closed(function), function)
        self._take(self.around, _from_module(function), function)

    def _take(self, values: Values, read: Iterator[tuple[str, Any]], reader: types.FunctionType) -> None:
        for name, value in read:
            if isinstance(value, types.FunctionType):
                if value.__module__ == reader.__module__ and value not in self._seen:
                    self._seen.add(value)
                    self._read(value)
            elif not _is_same(values.setdefault(name, value), value):  # a helper's own of that name
                values[f"{name} of {reader.__qualname__}"] = value


def plain_function(function: Callable[..., Any]) -> types.FunctionType | None:
    """Return the function in Python that a method or an object runs when it is called; None of what is written in another language."""
    if not isinstance(function, (types.FunctionType, types.MethodType, type)):
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    return function if isinstance(function, types.FunctionType) else None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (str, bytes, int, float)) and one == other)


def _told(function: types.FunctionType) -> bytes:
    """Return what a function does, without names of files, numbers of lines and its docstring."""
    told: list[Any] = []
    for part in _codes(function.__code__):
        consts = [const for const in part.co_consts if not _is_code(const)]
        if part is function.__code__ and function.__doc__ is not None and function.__doc__ in consts[:1]:
            consts[0] = None
        plain = [sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const) for const in consts]
        told.append((part.co_code, part.co_names, plain))
    return repr(told).encode("utf-8", "surrogatepass")


def _closed(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function takes along from where it was made."""
    code, defaults, stored = function.__code__, function.__defaults__ or (), _stored(function)
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name not in stored:
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue


def _from_module(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = {name for code in _codes(function.__code__) for name in code.co_names} - _stored(function)
    yield from ((name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__)


def _stored(function: types.FunctionType) -> set[str]:
    """Return the names around a function that it assigns itself, or whose content it writes: ``seen.append(x)``, ``seen[x] = 1``."""
    stored: set[str] = set()
    for code in _codes(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL")]
        for place, step in enumerate(steps):
            reads = step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")
            if step.opname in _STORES or (reads and _writes(steps[place + 1 :])):
                stored.add(step.argval)
    return stored


def _writes(steps: list[dis.Instruction]) -> bool:
    """Return whether the steps after a value was read write into it."""
    first = steps[0] if steps else None
    if first is not None and first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in (*_ADDING, *_TAKING)
    for step in steps:  # those that make a key
        if step.opname.startswith(("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE", "COPY")):
            return True
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            return step is first
        if not step.opname.startswith(_KEY_STEPS) or step.argrepr == "[]":
            return False
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if _is_code(const):
            yield from _codes(const)


def _is_code(value: Any) -> bool:
    return isinstance(value, types.CodeType)
