"""All that code of the user's own may have read, as one short value to compare: a digest, which keeps nothing alive.

From a model on: modules, what they and objects hold, containers entry by entry, functions by their code and by the variables that
they name, tensors by identity, version, and numbers where they are few.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import hashlib
import itertools
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from oomguard.engines.transformers.held_bytes import bytes_in, stands_at
from oomguard.engines.transformers.held_state import PLAIN, attributes, is_module, is_own_module
from oomguard.engines.transformers.named_values import named_values, names_in
from oomguard.engines.transformers.own_code import OF_CLASS, is_library
from oomguard.engines.transformers.own_code import inside as called_by
from oomguard.engines.transformers.tensors import is_tensor

# What lies deeper, or comes after so many, is not looked at.
_DEEPEST: Final = 8
_MOST_PLACES: Final = 1 << 14
_MOST_ENTRIES: Final = 1 << 16
_MOST_TENSOR_BYTES: Final = 1 << 12
_SEQUENCES: Final = (list, tuple, collections.deque)
_CONFIGURATIONS: Final = frozenset({"PretrainedConfig", "PreTrainedConfig", "GenerationConfig"})
_PLAIN_OF_TORCH: Final = frozenset({"dtype", "device", "Size", "layout"})
# A module's own book-keeping.
_KEPT_BY_TORCH: Final = frozenset({"_parameters", "_buffers", "_modules"})
_Parts = Iterable[tuple[str, Any]]

_lock: Final = threading.Lock()
_numbers: Final = itertools.count(1)
_numbered: Final[dict[int, tuple[Any, int]]] = {}


def fingerprint(roots: _Parts, by_kind: Callable[[Any], bool] = lambda tensor: False) -> bytes:
    """Return what is the same for as long as all that is reached from some values is.

    Args:
        roots: the values, by name.
        by_kind: of which tensors only type and number of axes count.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        walk = _Walk(by_kind)
        walk.go(roots)
        return walk.digest()


def number_of(value: Any) -> int:
    """Return a number that an object keeps for life, and that no other gets after it."""
    with _lock:
        known = _numbered.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        try:
            reference = weakref.ref(value, functools.partial(_forget, id(value)))
        except TypeError:  # an object that takes no weak reference
            return id(value)
        _numbered[id(value)] = reference, next(_numbers)
        return _numbered[id(value)][1]


def _forget(identity: int, reference: Any) -> None:
    """Drop an object that is gone; without the lock, as the collector may call it anywhere."""
    known = _numbered.get(identity)
    if known is not None and known[0] is reference:
        _numbered.pop(identity, None)


class _Walk:
    """Goes from value to value, the nearest first."""

    def __init__(self, by_kind: Callable[[Any], bool]) -> None:
        self._by_kind = by_kind
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, tuple[int, Any]] = {}
        self._wanted: collections.deque[tuple[Any, int]] = collections.deque()

    def go(self, roots: _Parts) -> None:
        self._note(roots, 0)
        while self._wanted and len(self._seen) < _MOST_PLACES:
            value, depth = self._wanted.popleft()
            with contextlib.suppress(Exception):  # an object of anybody's, which may raise where it is looked at
                told, parts = self._look_at(value)
                self._tell(told)
                if depth < _DEEPEST:
                    self._note(parts, depth + 1)

    def digest(self) -> bytes:
        return self._hash.digest()

    def _tell(self, told: Any) -> None:
        self._hash.update(repr(told).encode(errors="replace"))

    def _note(self, parts: _Parts, depth: int) -> None:
        for name, value in parts:
            if isinstance(value, PLAIN):
                self._tell((name, type(value).__name__, value))
            elif id(value) in self._seen:
                self._tell((name, self._seen[id(value)][0]))
            else:
                self._seen[id(value)] = len(self._seen), value
                self._tell(name)
                self._wanted.append((value, depth))

    def _look_at(self, value: Any) -> tuple[Any, _Parts]:
        """Return what tells of a value by itself, and what it holds."""
        if is_tensor(value):
            return self._of_tensor(value), ()
        return next(look(value) for is_such, look in _KINDS if is_such(value))

    def _of_tensor(self, tensor: Any) -> Any:
        if self._by_kind(tensor):
            return str(tensor.dtype), tensor.dim()
        version = None if tensor.is_inference() else tensor._version
        return number_of(tensor), tuple(tensor.shape), str(tensor.dtype), version, _sum_of(tensor)


def _entries(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    keys = (repr(key) if isinstance(key, PLAIN) else type(key).__name__ for key in value)
    return zip(keys, itertools.islice(value.values(), _MOST_ENTRIES), strict=False)


def _few(entries: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    return ((str(place), entry) for place, entry in itertools.islice(entries, _MOST_ENTRIES))


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object of no library holds, and its class."""
    if not is_library(type(value).__module__) and type(value).__module__ not in ("builtins", "collections"):
        yield from attributes(value).items()
        yield "class", type(value)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what the classes of a class hold that are no library's, and a library's ``forward``, which may be put in its place."""
    for base in kind.__mro__:
        if not _is_installed(base):
            yield from (
                (name, held) for name, held in vars(base).items() if not name.startswith("__") or callable(held)
            )
        elif "forward" in vars(base):
            yield "forward", vars(base)["forward"]
    if type(kind) is not type:
        yield "metaclass", type(kind)


def _is_installed(kind: type) -> bool:
    return is_library(kind.__module__) or not is_own_module(sys.modules.get(kind.__module__))


def _of_function(function: types.FunctionType) -> tuple[Any, _Parts]:
    module = function.__globals__.get("__name__")
    if is_library(module):
        return (function.__name__, number_of(function)), ()
    code = function.__code__
    return (function.__name__, hash(code)), _named(function)


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = names_in(function.__code__)
    for name, _, _, value in named_values(function):
        if isinstance(value, types.ModuleType) and not is_own_module(value):
            # Of a library's module what the code names of it: it may be put in the place of the library's own.
            yield from ((f"{name}.{each}", vars(value)[each]) for each in sorted(names & vars(value).keys()))
        else:
            yield name, value


def _of_module(module: Any) -> Iterator[tuple[str, Any]]:
    yield from module._modules.items()
    yield from module._parameters.items()
    yield from module._buffers.items()
    is_own = not is_library(type(module).__module__)
    for name, value in vars(module).items():
        is_kept_by_torch = name in _KEPT_BY_TORCH or name.endswith(("_hooks", "_hooks_with_kwargs"))
        if not is_kept_by_torch and (is_own or isinstance(value, PLAIN) or callable(value)):
            yield name, value
    yield "class", type(module)


def _of_array(array: Any) -> tuple[Any, _Parts]:
    return (array.shape, zlib.crc32(repr(array).encode() if array.dtype.hasobject else array.tobytes())), ()


def _of_another(value: Any) -> tuple[Any, _Parts]:
    """Return what tells of bytes, a stream, a generator, an object."""
    kind = type(value)
    if (told := bytes_in(value)) is not None or (told := stands_at(value)) is not None:
        return (kind.__name__, zlib.crc32(repr(told).encode())), ()
    if any(base.__name__ in _CONFIGURATIONS for base in kind.__mro__):
        return kind.__name__, vars(value).items()
    if is_library(kind.__module__) or kind.__module__ in ("builtins", "logging"):
        return (kind.__name__, number_of(value)), ()
    return kind.__name__, _of_object(value)


def _sum_of(tensor: Any) -> int | None:
    """Return a checksum of the numbers of a small tensor: what writes to its ``data`` counts no version."""
    import torch

    is_plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
    if not is_plain or tensor.nbytes > _MOST_TENSOR_BYTES:
        return None
    return zlib.crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


# What tells of a value of each kind by itself, and what it holds.
_KINDS: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], tuple[Any, _Parts]]], ...]] = (
    (lambda value: isinstance(value, type), lambda kind: (("class", kind.__name__, number_of(kind)), _of_class(kind))),
    (lambda value: isinstance(value, types.FunctionType), _of_function),
    (
        lambda value: isinstance(value, types.MethodType),
        lambda method: ("method", [("function", method.__func__), ("self", method.__self__)]),
    ),
    (
        lambda value: isinstance(value, functools.partial),
        lambda value: ("partial", [("function", value.func), ("args", value.args), ("keywords", value.keywords)]),
    ),
    (
        lambda value: isinstance(value, OF_CLASS) or callable(getattr(value, "__wrapped__", None)),
        lambda value: (type(value).__name__, [("calls", called_by(value))]),
    ),
    (
        lambda value: isinstance(value, dict),
        lambda value: (("dict", len(value)), [*_entries(value), *_of_object(value)]),
    ),
    (
        lambda value: isinstance(value, _SEQUENCES),
        lambda value: ((type(value).__name__, len(value)), [*_few(enumerate(value)), *_of_object(value)]),
    ),
    (
        lambda value: isinstance(value, (set, frozenset)),
        lambda value: ((len(value), sorted(repr(each) for each in value if isinstance(each, PLAIN))), ()),
    ),
    (
        lambda value: isinstance(value, types.ModuleType),
        lambda value: (value.__name__, sorted(vars(value).items()) if is_own_module(value) else ()),
    ),
    (is_module, lambda module: (("module", module.training, type(module).__name__), _of_module(module))),
    (lambda value: type(value).__module__.startswith("numpy") and hasattr(value, "tobytes"), _of_array),
    (lambda value: isinstance(value, contextvars.ContextVar), lambda value: ("context", [("value", value.get(None))])),
    (
        lambda value: type(value).__module__ == "torch" and type(value).__name__ in _PLAIN_OF_TORCH,
        lambda value: (str(value), ()),
    ),
    (lambda value: True, _of_another),
)
