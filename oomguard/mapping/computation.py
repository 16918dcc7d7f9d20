"""Identify a computation, so that results of another model, function or setting are not reused.

With ``identity``, these count: the user's values, the module and name of the function, its closure,
and the arguments that ``functools.partial`` bound. Its code and what it reads from its module are
stored with the results, so that oomguard can warn after an edit. Without ``identity``, the code,
the values that it reads and the names of its models count themselves.
"""

from __future__ import annotations

import argparse
import dis
import functools
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.log import get_logger
from oomguard.probe import torch_memory

# A function's digest covers its code, the code of helpers in its module, and the values that they
# read.

_STORES: Final = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})
_ADDING: Final = ("add", "append", "appendleft", "extend", "insert", "setdefault", "update")
_TAKING: Final = ("clear", "discard", "pop", "popitem", "popleft", "remove")
_KEY_STEPS: Final = ("LOAD_", "BINARY_OP", "BUILD_")
Values = dict[str, Any]


class FunctionCode:
    """Hold what oomguard reads of a function.

    Attributes:
        closed: the closure and the arguments' defaults, by name. Values that the function itself
            changes are left out.
        around: the values that it reads from its module.

    Args:
        function: the function.
        decorators: the functions that ``functools.wraps`` made of it. Those of other modules count
            by their closure.
    """

    def __init__(
        self, function: types.FunctionType, decorators: Iterable[types.FunctionType] = ()
    ) -> None:
        self.closed: Values = {}
        self.around: Values = {}
        self._code = blake2b(digest_size=16)
        self._seen = {function, *decorators}
        self._read(function)
        for decorator in decorators:
            if decorator.__globals__ is function.__globals__:
                self._read(decorator)
            else:
                self._take(self.closed, _closed(decorator), decorator)

    @property
    def digest(self) -> str:
        """The digest of all code."""
        return self._code.hexdigest()

    def _read(self, function: types.FunctionType) -> None:
        self._code.update(_code_bytes(function))
        self._take(self.closed, _closed(function), function)
        self._take(self.around, _from_module(function), function)

    def _take(
        self, values: Values, read: Iterator[tuple[str, Any]], reader: types.FunctionType
    ) -> None:
        for name, value in read:
            if isinstance(value, types.FunctionType):
                if value.__module__ == reader.__module__ and value not in self._seen:
                    self._seen.add(value)
                    self._read(value)
            # a helper has its own value of this name
            elif not _is_same(values.setdefault(name, value), value):
                values[f"{name} of {reader.__qualname__}"] = value


def plain_function(function: Callable[..., Any]) -> types.FunctionType | None:
    """Return the Python function behind a method or a callable object, or None for native code."""
    if not isinstance(function, (types.FunctionType, types.MethodType, type)):
        function = type(function).__call__
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return function
    return None


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, (str, bytes, int, float)) and one == other
    )


def _code_bytes(function: types.FunctionType) -> bytes:
    """Return a function's code as bytes, without file names, line numbers and its docstring."""
    parts: list[Any] = []
    for part in _codes(function.__code__):
        consts = []
        for const in part.co_consts:
            if not _is_code(const):
                consts.append(const)
        if (
            part is function.__code__
            and function.__doc__ is not None
            and function.__doc__ in consts[:1]
        ):
            consts[0] = None
        plain: list[str | list[str]] = []
        for const in consts:
            # The order of a frozenset differs from run to run.
            if isinstance(const, frozenset):
                plain.append(sorted(map(repr, const)))
            else:
                plain.append(repr(const))
        parts.append((part.co_code, part.co_names, plain))
    return repr(parts).encode("utf-8", "surrogatepass")


def _closed(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values in a function's closure and its arguments' defaults."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    stored = _stored(function)
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name not in stored:
            try:
                yield name, cell.cell_contents
            except ValueError:
                # not assigned yet
                continue


def _from_module(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names: set[str] = set()
    for code in _codes(function.__code__):
        names.update(code.co_names)
    for name in sorted(names - _stored(function)):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _stored(function: types.FunctionType) -> set[str]:
    """Return the outer names that a function assigns or changes, as in ``seen.append(x)``."""
    stored: set[str] = set()
    for code in _codes(function.__code__):
        steps = []
        for instruction in dis.get_instructions(code):
            if instruction.opname not in ("CACHE", "PUSH_NULL"):
                steps.append(instruction)
        for place, step in enumerate(steps):
            reads = step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")
            if step.opname in _STORES or (reads and _writes(steps[place + 1 :])):
                stored.add(step.argval)
    return stored


def _writes(steps: list[dis.Instruction]) -> bool:
    """Return whether the instructions after a value was read change it."""
    if steps:
        first = steps[0]
    else:
        first = None
    if first is not None and first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in (*_ADDING, *_TAKING)
    # These instructions store to a key or attribute that was computed.
    for step in steps:
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


# A digest describes a value's content and is the same in every process. JSON-compatible values
# count by their JSON (a tuple is its list); tensors and arrays by type, shape and bytes.

DIGEST_BYTES: Final = 16


class UnknownContentError(TypeError):
    """Report a value whose content is unknown; the message is its type."""


def digest(value: Any) -> bytes:
    """Return the digest of a value's content.

    Raises:
        UnknownContentError: the value contains something other than JSON, tensors, arrays, bytes
            and paths.
    """
    if isinstance(value, str):
        text = "t" + value
    else:
        try:
            text = "j" + _encode(value)
        except UnknownContentError:
            raise
        except (
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            # Keys of several types, or a list that contains itself.
            raise UnknownContentError(f"{_name(type(value))}: {error}") from None
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _stand_in(value: Any) -> Any:
    """Return a JSON-compatible replacement for a value."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": _hashed(value)}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if hasattr(value, "untyped_storage"):
        return {"tensor": [str(value.dtype), list(value.shape), _hashed(_tensor_bytes(value))]}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return {"array": [str(value.dtype), list(value.shape), _hashed(value.tobytes())]}
    raise UnknownContentError(_name(type(value)))


_encode: Final[Callable[[Any], str]] = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_stand_in
).encode


def _hashed(content: Any) -> str:
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def _tensor_bytes(tensor: Any) -> bytes:
    import torch

    with torch_memory.on_host():
        host = tensor.detach().to("cpu").contiguous().reshape(-1)
        return bytes(host.view(torch.uint8).numpy())


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


# Small and plain values count by their content: settings, as in JSON, and small tensors.

SCALARS: Final = (str, int, float, bool, bytes, type(None))
_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
# Limit of values and containers in one value. Settings have tens; a larger value is a data set,
# which is too slow to read at each call.
_MOST: Final = 1000
_MOST_NUMBERS: Final = 2**20
_DEEPEST: Final = 20


class NotPlainError(TypeError):
    """Report a value that is large or contains other than plain values; the message is its type."""


def is_container(value: Any) -> bool:
    """Return whether a value is a dictionary, a list or an ``argparse`` namespace."""
    return (
        isinstance(value, (dict, list, tuple, set, frozenset, *_NAMESPACES))
        or _numbers(value) is not None
    )


def plain_content(value: Any) -> Any:
    """Return a value as ``digest`` accepts it: namespaces become dictionaries, and sets are
    sorted.

    Raises:
        NotPlainError: it has more than 1,000 values, or others than texts, numbers and small
            tensors.
    """
    left = [_MOST]
    try:
        return _plain(value, left, _DEEPEST)
    except NotPlainError:
        raise NotPlainError(type(value).__qualname__) from None


def _plain(value: Any, left: list[int], deepest: int) -> Any:
    left[0] -= 1
    if left[0] < 0 or not deepest:
        raise NotPlainError
    if isinstance(value, (*SCALARS, PurePath)):
        return value
    if (numbers := _numbers(value)) is not None and numbers <= _MOST_NUMBERS:
        return value
    if isinstance(value, _NAMESPACES):
        value = vars(value)
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            pairs = []
            for key, entry in value.items():
                pairs.append([repr(_plain(key, left, 1)), _plain(entry, left, deepest - 1)])
            return sorted(pairs, key=lambda pair: str(pair[0]))
        return {key: _plain(entry, left, deepest - 1) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(entry, left, 1)) for entry in value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry, left, deepest - 1) for entry in value]
    raise NotPlainError


def _numbers(value: Any) -> int | None:
    """Return the number of elements of a tensor or an array, or None for another value."""
    if isinstance(value, type):
        return None
    if hasattr(value, "untyped_storage"):
        return int(value.numel())
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return int(value.size)
    return None


# Without ``identity`` a model counts by its name, some values of its weights, and its modules'
# settings. Training or a new download changes the weights. A parameter sweep may change a module's
# scale or add a hook; the content of a hook is unknown.

# Attributes that only a model has, unlike a list of prompts, a lock or a logger.
_OF_MODELS: Final = ("parameters", "generate")
_NO_VALUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
# Number of values to read of each weight. Training changes nearly all of them, and reading
# everything would take as long as loading.
_SAMPLED: Final = 64
_DIGEST_BYTES: Final = 8
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")
# Modules whose hooks only move weights or record outputs, so they do not change a result.
_KNOWN_HOOKS: Final = frozenset({"accelerate", "oomguard", "peft", "torch", "transformers"})
# Attributes that a forward pass may set itself, such as a larger position table or bitsandbytes'
# type.
_OWN_NOTES: Final = ("cache", "_is_set")
# Private attributes of peft that decide which adapter is used.
_COUNTED_NOTES: Final = frozenset({"_active_adapter", "_disable_adapters"})


class UnnamedModelError(TypeError):
    """Report a model without an identity; the message is its type and what is missing."""


def is_model(value: Any) -> bool:
    """Return whether a value is a model, or contains one like a transformers pipeline."""
    return _is_model_itself(value) or _is_model_itself(_inner(value))


def model_name(value: Any) -> str:
    """Return a model's name and revision, with digests of weights or files and of settings.

    Raises:
        UnnamedModelError: it has no name, or it has hooks that may change its results.
    """
    if _is_model_itself(value):
        model = value
    else:
        model = _inner(value)
    path = getattr(model, "name_or_path", None)
    if not isinstance(path, str) or not path:
        raise UnnamedModelError(f"{type(model).__qualname__} without a name")
    if (hook := _hook(model)) is not None:
        raise UnnamedModelError(f"{type(model).__qualname__} with a forward hook, {hook}")
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    generation = [_generation(model)]
    if model is not value:
        generation.append(_generation(value))
    parts = (path, revision, _weights(model) or _files(Path(path)), *generation, _settings(model))
    return " ".join(map(str, filter(None, parts)))


def _is_model_itself(value: Any) -> bool:
    if isinstance(value, _NO_VALUE):
        return False
    return any(callable(getattr(value, name, None)) for name in _OF_MODELS)


def _inner(value: Any) -> Any:
    if isinstance(value, _NO_VALUE):
        return None
    return getattr(value, "model", None)


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        yield from model.named_modules()


def _hook(model: Any) -> str | None:
    """Return the name of a forward hook that the user added to a model or a module, or None."""
    for place, module in _modules(model):
        hooks: list[Any] = []
        for kind in _HOOKS:
            hooks += getattr(module, kind).values()
        for hook in hooks:
            # functools.partial
            function = getattr(hook, "func", hook)
            package = (getattr(function, "__module__", None) or "").partition(".")[0]
            if package not in _KNOWN_HOOKS:
                name = getattr(function, "__qualname__", type(function).__qualname__)
                if place:
                    return f"{name} on {place}"
                return str(name)
    return None


def _generation(model: Any) -> str | None:
    """Return a digest of a model's generation settings, or None without any."""
    to_dict = getattr(getattr(model, "generation_config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    settings = dict(to_dict())
    settings.pop("transformers_version", None)
    text = json.dumps(settings, sort_keys=True, default=lambda value: type(value).__qualname__)
    return f"generation {_models_short(text)}"


def _settings(model: Any) -> str | None:
    """Return a digest of the plain public attributes of a model's modules, or None without
    modules.
    """
    found: list[Any] = []
    for place, module in _modules(model):
        for name, value in sorted(vars(module).items()):
            is_note = any(part in name for part in _OWN_NOTES)
            if is_note or (name[:1] == "_" and name not in _COUNTED_NOTES):
                continue
            try:
                found.append((place, name, digest(plain_content(value)).hex()))
            except (NotPlainError, UnknownContentError):
                continue
    if found:
        return f"settings {_models_short(repr(found))}"
    return None


def _models_short(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _weights(model: Any) -> str | None:
    """Return a digest of some values of each weight, or None if they are not in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return None
    hasher = blake2b(digest_size=_DIGEST_BYTES)
    read = False
    try:
        with torch.no_grad(), torch_memory.on_host():
            for name, module in model.named_modules():
                for own, weight in _models_stored(module):
                    hasher.update(f"{name}.{own} {weight.dtype} {tuple(weight.shape)}".encode())
                    values = weight.detach().reshape(-1)
                    values = values[:: max(1, values.numel() // _SAMPLED)].to("cpu").contiguous()
                    hasher.update(values.view(torch.uint8).numpy().tobytes())
                    read = True
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
        TypeError,
    ):
        # On the meta device, or in a layout without strides.
        return None
    if read:
        return f"weights {hasher.hexdigest()}"
    return None


def _models_stored(module: Any) -> list[tuple[str, Any]]:
    """Return the weights of a module as in a checkpoint, without caches and computed tables."""
    buffers = {}
    for name, held in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            buffers[name] = held
    stored = []
    for name, weight in {**module._parameters, **buffers}.items():
        if weight is not None:
            stored.append((name, weight))
    return stored


def _files(folder: Path) -> str | None:
    """Return a digest of a model folder's names, sizes and times; None without a folder."""
    try:
        files = []
        for file in sorted(folder.iterdir()):
            if file.is_file():
                files.append((file.name, file.stat()))
    except OSError:
        return None
    states = [(name, found.st_size, found.st_mtime_ns) for name, found in files]
    return f"files {_models_short(repr(states))}"


CODE: Final = "code of fn"
_ANY_CODE: Final = ("code", "any")
_SAY: Final = 'give its identity: identity={"model": "org/name", "revision": "main", "seed": 0}'
_MAIN: Final = ("__main__", "__mp_main__")
# Longer lists and dictionaries are shown as a digest.
_READABLE: Final = 60
_told_of: Final = set[tuple[str, str]]()


@dataclass(frozen=True, slots=True)
class Computation:
    """Identify a computation, and describe it for warnings.

    Attributes:
        digest: equal only for equal computations.
        described: the parts of the identity, as JSON.
        name: the name of ``fn``.
        code: the code of ``fn`` and the values that it reads, as JSON. None: they are a part of the
            identity, or need not be compared.
    """

    digest: bytes
    described: str
    name: str
    code: str | None = None


def computation_of(fn: Callable[..., Any], identity: Mapping[str, Any] | None) -> Computation:
    """Return the computation of a function.

    Args:
        fn: the function.
        identity: the user's values. None: use the code and the values that it reads.

    Raises:
        UsageError: a value of ``identity`` has unknown content, or without ``identity`` the
            function uses an object of unknown content.
    """
    function, bound, decorators = _unbound(fn)
    plain = plain_function(function)
    code = None
    is_said = identity is not None
    given = {} if identity is None else _checked(identity)
    parts: dict[str, Any] = {"function": _full_name(function)}
    for name, value in given.items():
        if (name, value) != _ANY_CODE:
            parts[name] = _given_identity(name, value)
    found = {
        name: known
        for name, value in bound.items()
        if (known := _bound(name, value, is_said=is_said)) is not None
    }
    if not is_said:
        found |= _read_from(function, decorators)
    elif plain is not None:
        read = FunctionCode(plain, decorators)
        closed = _scalars(read.closed)
        found = {name: value for name, value in closed.items() if name not in given} | found
        if plain.__name__ == "<lambda>":
            # Many functions share this name.
            found[CODE] = read.digest
        if "code" not in given:
            replaced = {}
            for name, value in closed.items():
                if name in given:
                    replaced[name] = value
            held = _containers(read.closed)[0] | _containers(read.around)[0]
            values = held | _scalars(read.around) | _of_object(function) | replaced
            made = {"python": sys.implementation.cache_tag, CODE: read.digest, **values}
            code = json.dumps(made, default=str, sort_keys=True)
    _add_renamed(parts, found)
    described = json.dumps(parts, default=str, sort_keys=True)
    return Computation(digest(parts), described, _named(function).__qualname__, code)


def differences(own: str, other: str) -> list[str]:
    """Return the differences of two descriptions or codes made by the same Python."""
    mine = json.loads(own)
    others = json.loads(other)
    names = set()
    for name in {*mine, *others}:
        if _text(mine, name) != _text(others, name):
            names.add(name)
    if "python" in names:
        names -= {"python", CODE}
    lines = []
    for name in sorted(names):
        if name == CODE:
            lines.append(f"the {CODE}")
        else:
            lines.append(f"{name} {_shown(others, mine, name)} -> {_shown(mine, others, name)}")
    return lines


def _text(parts: Mapping[str, Any], name: str) -> str | None:
    if name in parts:
        return json.dumps(parts[name], sort_keys=True)
    return None


def _shown(parts: Mapping[str, Any], others: Mapping[str, Any], name: str) -> str:
    """Return a value as text that differs from the other value's text."""
    if name not in parts:
        return "(not given)"
    alike = name in others and str(parts[name]) == str(others[name])
    if alike:
        return repr(parts[name])
    return str(parts[name])


def _unbound(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], dict[str, Any], list[types.FunctionType]]:
    """Return the function below ``functools.partial`` and decorators, and what they bind."""
    bound: dict[str, Any] = {}
    decorators: list[types.FunctionType] = []
    while isinstance(fn, functools.partial) or hasattr(fn, "__wrapped__"):
        if isinstance(fn, functools.partial):
            bound = (
                {f"argument {place}": value for place, value in enumerate(fn.args)}
                | fn.keywords
                | bound
            )
            fn = fn.func
        else:
            decorators += [fn] if isinstance(fn, types.FunctionType) else []
            fn = fn.__wrapped__
    return fn, bound, decorators


def _named(function: Callable[..., Any]) -> Any:
    if hasattr(function, "__qualname__"):
        return function
    return type(function)


def _full_name(function: Callable[..., Any]) -> str:
    """Return a function's name with its module; for the main module, the name of its file."""
    named = _named(function)
    module = getattr(named, "__module__", None)
    if module in _MAIN:
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name
        elif file:
            module = Path(file).stem
        else:
            module = "__main__"
    own: str = named.__qualname__
    if module:
        return f"{module}.{own}"
    return own


def _checked(identity: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(identity, Mapping):
        raise UsageError(
            f"identity must be a dictionary with names as keys, got {identity!r}", hint=_SAY
        )
    for name in identity:
        if not isinstance(name, str):
            raise UsageError(f"identity has the key {name!r}, but keys must be texts", hint=_SAY)
    return identity


def _given_identity(name: str, value: Any) -> Any:
    try:
        return _short(value)
    except UnknownContentError as error:
        raise UsageError(
            f"identity[{name!r}] is a {error}, whose content oomguard cannot identify", hint=_SAY
        ) from None


def _bound(name: str, value: Any, *, is_said: bool) -> Any:
    """Return a bound argument's identity, or None for an object if ``identity`` was given."""
    try:
        if is_model(value) and not is_said:
            return _model(name, value)
        return _short(value)
    except UnknownContentError as error:
        if is_said:
            return None
        raise UsageError(
            f"fn is bound to {name}, a {error}, which oomguard cannot identify", hint=_SAY
        ) from None


def _short(value: Any) -> Any:
    """Return a value if it is short enough to read, otherwise the digest of its content."""
    known = digest(value).hex()
    if isinstance(value, SCALARS):
        if isinstance(value, bytes):
            return known
        return value
    try:
        text = json.dumps(value)
    except TypeError:
        # Bytes and tensors have no readable form in JSON.
        return known
    if len(text) <= _READABLE:
        return json.loads(text)
    return known


def _read_from(
    function: Callable[..., Any], decorators: Iterable[types.FunctionType]
) -> dict[str, Any]:
    """Return the identity that a function's code and the values that it reads add."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.MethodType) and is_model(owner):
        return {"model": _model("its object", owner)}
    if isinstance(function, types.BuiltinFunctionType | type):
        return {}
    if not isinstance(function, types.FunctionType):
        what = type(owner if owner is not None else function).__qualname__
        raise UsageError(
            f"fn belongs to an object, a {what}, which oomguard cannot identify", hint=_SAY
        )
    read = FunctionCode(function, decorators)
    found = {CODE: read.digest}
    for values in (read.closed, read.around):
        models = {}
        for name, value in values.items():
            if is_model(value):
                models[name] = _model(name, value)
        held, unseen = _containers(values)
        counted = models | _scalars(values) | held
        _add_renamed(found, counted)
        _tell_of_unseen(_full_name(function), unseen)
    return found


def _containers(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the small plain containers, and the types of the other ones."""
    held = dict[str, Any]()
    unseen = dict[str, str]()
    for name, value in values.items():
        if is_container(value) and not _is_scalar(value):
            try:
                held[name] = _short(plain_content(value))
            except (NotPlainError, UnknownContentError):
                unseen[name] = type(value).__qualname__
    return held, unseen


def _tell_of_unseen(function: str, unseen: Mapping[str, str]) -> None:
    """Warn once about values that a function reads and that do not count."""
    for name, kind in unseen.items():
        if (function, name) not in _told_of:
            _told_of.add((function, name))
            what = (
                f"fn reads {name}, a {kind} that is large or contains objects, so changes of its "
                "content are not detected"
            )
            get_logger().warning(what, fn=function, hint=_SAY)


def _add_renamed(parts: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Add values; the name of one that another part has already gets `` of fn`` added."""
    for name, value in values.items():
        if name in parts:
            parts[f"{name} of fn"] = value
        else:
            parts[name] = value


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        if _is_scalar(value):
            found[name] = _short(value)
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, SCALARS) or (
        type(value) is tuple and all(isinstance(one, SCALARS) for one in value)
    )


def _of_object(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the texts and numbers of a callable object, or of a method's object."""
    if isinstance(function, types.FunctionType):
        owner = None
    else:
        owner = getattr(function, "__self__", function)
    if isinstance(owner, type) or is_model(owner):
        return {}
    held = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        if name[:1] != "_":
            held[f"self.{name}"] = value
    return _scalars(held)


def _model(name: str, model: Any) -> str:
    try:
        return model_name(model)
    except UnnamedModelError as error:
        raise UsageError(
            f"fn uses {name}, a {error}, so oomguard could reuse results of another model",
            hint=_SAY,
        ) from None
