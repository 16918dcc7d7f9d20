"""What identifies a computation: results of another model, other settings or another function are never taken for its own.

What the user says of it (``identity``) counts, beside the function's module and name, what it closes over and what ``functools.partial``
bound; its code, and what it reads from its module, are noted with the results, so that an edit is told. Where nothing is said, code and
what it reads count themselves, with the names of the models that it uses.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.errors import UsageError
from oomguard.log import get_logger
from oomguard.mapping.content import UnknownContentError, digest
from oomguard.mapping.function_code import FunctionCode, plain_function
from oomguard.mapping.models import UnnamedModelError, is_model, model_name
from oomguard.mapping.plain_values import SCALARS, NotPlainError, is_container, plain

CODE: Final = "code of fn"
_ANY_CODE: Final = ("code", "any")
_SAY: Final = 'say what identifies it: identity={"model": "org/name", "revision": "main", "seed": 0}'
_MAIN: Final = ("__main__", "__mp_main__")
# Longer lists and dicts are shown as a digest.
_READABLE: Final = 60
_told_of: Final = set[tuple[str, str]]()


@dataclass(frozen=True, slots=True)
class Computation:
    """What identifies a computation, and what is told where it changes.

    Attributes:
        digest: the same for equal computations only.
        described: what it is made of, as JSON.
        name: what ``fn`` is called.
        code: the code of ``fn`` and what it reads, as JSON, where they do not identify it; None where they do, or need not be compared.
    """

    digest: bytes
    described: str
    name: str
    code: str | None = None


def computation_of(fn: Callable[..., Any], identity: Mapping[str, Any] | None) -> Computation:
    """Return what identifies the computation of a function.

    Raises:
        UsageError: what is said of it has no content that can be told, or nothing is said and the function uses an object of which
            nothing tells what it is.
    """
    function, bound, decorators = _unbound(fn)
    plain, code = plain_function(function), None
    is_said = identity is not None
    said = {} if identity is None else _checked(identity)
    parts: dict[str, Any] = {"function": _full_name(function)}
    parts |= {name: _said(name, value) for name, value in said.items() if (name, value) != _ANY_CODE}
    found = {
        name: known for name, value in bound.items() if (known := _bound(name, value, is_said=is_said)) is not None
    }
    if not is_said:
        found |= _read_from(function, decorators)
    elif plain is not None:
        read = FunctionCode(plain, decorators)
        closed = _scalars(read.closed)
        found = {name: value for name, value in closed.items() if name not in said} | found
        if plain.__name__ == "<lambda>":
            found[CODE] = read.digest  # its name is that of many
        if "code" not in said:
            replaced = {name: value for name, value in closed.items() if name in said}
            held = _containers(read.closed)[0] | _containers(read.around)[0]
            values = held | _scalars(read.around) | _of_object(function) | replaced
            made = {"python": sys.implementation.cache_tag, CODE: read.digest, **values}
            code = json.dumps(made, default=str, sort_keys=True)
    parts |= {name if name not in parts else f"{name} of fn": value for name, value in found.items()}
    described = json.dumps(parts, default=str, sort_keys=True)
    return Computation(digest(parts), described, _named(function).__qualname__, code)


def differences(own: str, other: str) -> list[str]:
    """Return in what two descriptions, or two codes, differ; the code of two Pythons is not compared."""
    mine, others = json.loads(own), json.loads(other)
    names = {name for name in {*mine, *others} if _text(mine, name) != _text(others, name)}
    if "python" in names:
        names -= {"python", CODE}
    return [
        f"the {CODE}" if name == CODE else f"{name} {_shown(others, mine, name)} -> {_shown(mine, others, name)}"
        for name in sorted(names)
    ]


def _text(parts: Mapping[str, Any], name: str) -> str | None:
    return json.dumps(parts[name], sort_keys=True) if name in parts else None


def _shown(parts: Mapping[str, Any], others: Mapping[str, Any], name: str) -> str:
    """Return a value to show, so that it does not look like the other one."""
    if name not in parts:
        return "(not given)"
    alike = name in others and str(parts[name]) == str(others[name])
    return repr(parts[name]) if alike else str(parts[name])


def _unbound(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], dict[str, Any], list[types.FunctionType]]:
    """Return the function below ``functools.partial`` and decorators, the arguments that are bound, and what decorators made."""
    bound: dict[str, Any] = {}
    decorators: list[types.FunctionType] = []
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        if isinstance(fn, functools.partial):
            bound = {f"argument {place}": value for place, value in enumerate(fn.args)} | fn.keywords | bound
            fn = fn.func
        else:
            decorators += [fn] if isinstance(fn, types.FunctionType) else []
            fn = fn.__wrapped__
    return fn, bound, decorators


def _named(function: Callable[..., Any]) -> Any:
    return function if hasattr(function, "__qualname__") else type(function)


def _full_name(function: Callable[..., Any]) -> str:
    """Return the name of a function with its module's; the program's own module has the name of its file."""
    named = _named(function)
    module = getattr(named, "__module__", None)
    if module in _MAIN:
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else "__main__"
    return f"{module}.{named.__qualname__}" if module else named.__qualname__


def _checked(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(identity, Mapping):
        raise UsageError(f"identity is {identity!r}", hint=_SAY)
    for name in identity:
        if not isinstance(name, str):
            raise UsageError(f"identity has {name!r} for a name: names are texts", hint=_SAY)
    return identity


def _said(name: str, value: Any) -> Any:
    try:
        return _short(value)
    except UnknownContentError as error:
        raise UsageError(f"identity[{name!r}] is a {error}: its content cannot be told", hint=_SAY) from None


def _bound(name: str, value: Any, *, is_said: bool) -> Any:
    """Return what a bound argument is; None for an object that the user's own words stand for."""
    try:
        return _model(name, value) if is_model(value) and not is_said else _short(value)
    except UnknownContentError as error:
        if is_said:
            return None
        raise UsageError(f"fn is bound to {name}, a {error}: what identifies it is not known", hint=_SAY) from None


def _short(value: Any) -> Any:
    """Return a value that can be read in the description, else the digest of its content."""
    known = digest(value).hex()
    if isinstance(value, SCALARS):
        return known if isinstance(value, bytes) else value
    try:
        text = json.dumps(value)
    except TypeError:  # it holds bytes or a tensor
        return known
    return json.loads(text) if len(text) <= _READABLE else known


def _read_from(function: Callable[..., Any], decorators: Iterable[types.FunctionType]) -> dict[str, Any]:
    """Return what a function's code, and what it reads from around it, say of the computation."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and is_model(owner):
        return {"model": _model("its object", owner)}
    if isinstance(function, types.BuiltinFunctionType | type):
        return {}
    if not isinstance(function, types.FunctionType):
        what = type(owner if owner is not None else function).__qualname__
        raise UsageError(f"fn belongs to an object, a {what}: what identifies it is not known", hint=_SAY)
    read = FunctionCode(function, decorators)
    found = {CODE: read.digest}
    for values in (read.closed, read.around):
        models = {name: _model(name, value) for name, value in values.items() if is_model(value)}
        held, unseen = _containers(values)
        counted = models | _scalars(values) | held
        found |= {name if name not in found else f"{name} of fn": value for name, value in counted.items()}
        _tell_of_unseen(_full_name(function), unseen)
    return found


def _containers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings in dicts, lists and namespaces that are small and plain, and the types of those that are not."""
    held, unseen = dict[str, Any](), dict[str, str]()
    for name, value in values.items():
        if is_container(value) and not _is_scalar(value):
            try:
                held[name] = _short(plain(value))
            except (NotPlainError, UnknownContentError):
                unseen[name] = type(value).__qualname__
    return held, unseen


def _tell_of_unseen(function: str, unseen: Mapping[str, str]) -> None:
    """Say once of what a function reads that its content does not count."""
    for name, kind in unseen.items():
        if (function, name) not in _told_of:
            _told_of.add((function, name))
            what = f"fn reads {name}, a {kind} that is large or holds objects: its content does not count"
            get_logger().warning(what, fn=function, hint=_SAY)


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _short(value) for name, value in values.items() if _is_scalar(value)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, SCALARS) or (type(value) is tuple and all(isinstance(one, SCALARS) for one in value))


def _of_object(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the texts and numbers of the object whose method, or which itself, is called."""
    owner = None if isinstance(function, types.FunctionType) else getattr(function, "__self__", function)
    if isinstance(owner, type) or is_model(owner):
        return {}
    held = {f"self.{name}": value for name, value in getattr(owner, "__dict__", {}).items() if name[:1] != "_"}
    return _scalars(held)


def _model(name: str, model: Any) -> str:
    try:
        return model_name(model)
    except UnnamedModelError as error:
        raise UsageError(
            f"fn uses {name}, a {error}: results of another model could be taken for its own", hint=_SAY
        ) from None
