"""Which values are small and plain, so that they count by their content: settings, as JSON has them, and small tensors."""

from __future__ import annotations

import argparse
import types
from pathlib import PurePath
from typing import Any, Final

SCALARS: Final = (str, int, float, bool, bytes, type(None))
_NAMESPACES: Final = (types.SimpleNamespace, argparse.Namespace)
# Values and containers in one value: settings have tens, and a data set that lies beside the function is not read at each call.
_MOST: Final = 1000
_MOST_NUMBERS: Final = 2**20
_DEEPEST: Final = 20


class NotPlainError(TypeError):
    """A value that is large, or holds something else than plain values; the message is its type."""


def is_container(value: Any) -> bool:
    """Return whether a value holds settings, as a dict, a list or the namespace of ``argparse`` does."""
    return isinstance(value, (dict, list, tuple, set, frozenset, *_NAMESPACES)) or _numbers(value) is not None


def plain(value: Any) -> Any:
    """Return a value as ``digest`` takes it, with namespaces as dicts and sets in an order.

    Raises:
        NotPlainError: it has more than 1,000 values, or others than texts, numbers and small tensors.
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
            pairs = [[repr(_plain(key, left, 1)), _plain(entry, left, deepest - 1)] for key, entry in value.items()]
            return sorted(pairs, key=lambda pair: str(pair[0]))
        return {key: _plain(entry, left, deepest - 1) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(entry, left, 1)) for entry in value)
    if isinstance(value, (list, tuple)):
        return [_plain(entry, left, deepest - 1) for entry in value]
    raise NotPlainError


def _numbers(value: Any) -> int | None:
    """Return how many numbers a tensor or an array has; None of anything else."""
    if isinstance(value, type):
        return None
    if hasattr(value, "untyped_storage"):
        return int(value.numel())
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return int(value.size)
    return None
