"""The tensors in what a call is given or gives, told without torch, and what they hold as the host sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from oomguard.observe import torch_memory

T = TypeVar("T")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; a class of tensors is none."""
    return hasattr(value, "untyped_storage") and not isinstance(value, type)


def of_host(compute: Callable[..., T], *given: Any) -> T:
    """Return what is computed of these values, tensors among them as copies on the host: a device that is full has no room for it."""
    with torch_memory.on_host():
        return compute(*(value.detach().to("cpu") if is_tensor(value) else value for value in given))


def tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value: it, or those in its entries."""
    if is_tensor(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(entry)
