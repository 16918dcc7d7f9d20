"""What identifies a computation: results of another model, other settings or another function are never taken for its own.

What the user says of it (``identity``) counts, beside the function's name and what ``functools.partial`` bound. Where nothing is said, the
function's own code counts, the texts and numbers that it reads from around it, and the names of the models that it uses.
"""

from __future__ import annotations

import dis
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from oomguard.errors import UsageError
from oomguard.mapping.content import UnknownContentError, digest

_SCALARS: Final = (str, int, float, bool, bytes, type(None))
_SAY: Final = 'say what identifies it: identity={"model": "org/name", "revision": "main", "seed": 0}'
_STORES: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
# What a model has that a list of prompts, a lock or a logger has not.
_OF_MODELS: Final = ("parameters", "generate")
_NO_VALUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class Computation:
    """``digest`` is the same for equal computations only; ``described`` is what it is made of, as JSON."""

    digest: bytes
    described: str


def computation_of(fn: Callable[..., Any], identity: Mapping[str, Any] | None) -> Computation:
    """Return what identifies the computation of a function.

    Raises:
        UsageError: what is said of it has no content that can be told, or nothing is said and the function uses an object of which
            nothing tells what it is.
    """
    function, bound = _unbound(fn)
    parts: dict[str, Any] = {"function": getattr(function, "__qualname__", type(function).__qualname__)}
    for name, value in bound.items():
        if (known := _bound(name, value, is_said=identity is not None)) is not None:
            parts[name] = known
    if identity is not None:
        parts |= {name: _said(name, value) for name, value in _checked(identity).items()}
        if parts["function"].endswith("<lambda>") and isinstance(function, types.FunctionType):
            parts["code"] = blake2b(_code(function), digest_size=16).hexdigest()  # its name is that of many
    else:
        parts |= _read_from(function)
    return Computation(digest(parts), json.dumps(parts, default=str, sort_keys=True))


def _unbound(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function below ``functools.partial`` and decorators, and the arguments that are bound."""
    bound: dict[str, Any] = {}
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        if isinstance(fn, functools.partial):
            bound = {f"argument {place}": value for place, value in enumerate(fn.args)} | fn.keywords | bound
            fn = fn.func
        else:
            fn = fn.__wrapped__
    return fn, bound


def _checked(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(identity, Mapping) or "function" in identity:
        what = "has 'function', which is fn's own name" if isinstance(identity, Mapping) else f"is {identity!r}"
        raise UsageError(f"identity {what}", hint=_SAY)
    return identity


def _said(name: str, value: Any) -> Any:
    try:
        return _short(value)
    except UnknownContentError as error:
        raise UsageError(f"identity[{name!r}] is a {error}: its content cannot be told", hint=_SAY) from None


def _bound(name: str, value: Any, *, is_said: bool) -> Any:
    """Return what a bound argument is; None for an object that the user's own words stand for."""
    try:
        return _model(name, value) if _is_model(value) and not is_said else _short(value)
    except UnknownContentError as error:
        if is_said:
            return None
        raise UsageError(f"fn is bound to {name}, a {error}: what identifies it is not known", hint=_SAY) from None


def _short(value: Any) -> Any:
    """Return a value that can be read in the description, else the digest of its content."""
    known = digest(value)
    return value if isinstance(value, _SCALARS) and not isinstance(value, bytes) else known.hex()


def _read_from(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function's code, and what it reads from around it, say of the computation."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and _is_model(owner):
        return {"model": _model("its object", owner)}
    if isinstance(function, types.BuiltinFunctionType | type):
        return {}
    if not isinstance(function, types.FunctionType):
        what = type(owner if owner is not None else function).__qualname__
        raise UsageError(f"fn belongs to an object, a {what}: what identifies it is not known", hint=_SAY)
    found: dict[str, Any] = {}
    code = blake2b(digest_size=16)
    _read(function, found, code, {function})
    return {"code": code.hexdigest(), **found}


def _read(function: types.FunctionType, found: dict[str, Any], code: Any, seen: set[types.FunctionType]) -> None:
    code.update(_code(function))
    for name, value in _around(function):
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            if value not in seen:
                _read(value, found, code, seen | {value})
        elif _is_model(value):
            found[name] = _model(name, value)
        elif isinstance(value, _SCALARS) or (type(value) is tuple and all(isinstance(one, _SCALARS) for one in value)):
            found[name] = _short(value)


def _code(function: types.FunctionType) -> bytes:
    """Return what a function does, without names of files and numbers of lines."""
    told: list[Any] = [value for value in function.__defaults__ or () if isinstance(value, _SCALARS)]
    for part in _codes(function.__code__):
        consts = [const for const in part.co_consts if not _is_code(const)]
        plain = [sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const) for const in consts]
        told.append((part.co_code, part.co_names, plain))
    return repr(told).encode("utf-8", "surrogatepass")


def _around(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function reads from the function around it and from its module; not what it counts up itself."""
    codes = list(_codes(function.__code__))
    stored = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname in _STORES}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        if name not in stored and hasattr(cell, "cell_contents"):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    for name in sorted({name for code in codes for name in code.co_names} - stored):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if _is_code(const):
            yield from _codes(const)


def _is_code(value: Any) -> bool:
    return isinstance(value, types.CodeType)


def _is_model(value: Any) -> bool:
    return not isinstance(value, _NO_VALUE) and any(callable(getattr(value, name, None)) for name in _OF_MODELS)


def _model(name: str, model: Any) -> str:
    """Return the name and revision of a model."""
    path = getattr(model, "name_or_path", None)
    if not isinstance(path, str) or not path:
        what = f"{name}, a {type(model).__qualname__} without a name"
        raise UsageError(f"fn uses {what}: results of another model could be taken for its own", hint=_SAY)
    return f"{path} {getattr(getattr(model, 'config', None), '_commit_hash', None) or ''}".rstrip()
