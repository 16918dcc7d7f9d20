"""The tensors in what a call is given or gives, told without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor."""
    return hasattr(value, "untyped_storage") and not isinstance(value, type)


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value: it, or those in its entries."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(entry)
