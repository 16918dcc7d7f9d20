"""What a model gives of the images of all rows, one after the other: that of the parts is put side by side, as their images were cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from oomguard.engines.transformers.media import data
from oomguard.observe import torch_memory

# Of each part, by its first row: the fields of its result that belong to no row, on the host.
Stored = dict[int, Mapping[str, Any]]
_OTHERWISE: Final = "what parts give of their images differs in more than the images"


def taken_off(result: Any, names: tuple[str, ...], stored: Stored, start: int) -> Any:
    """Return a part's result without these fields, which are stored."""
    own = {name: result[name] for name in names if isinstance(result, Mapping) and result.get(name) is not None}
    if start == 0:
        stored.clear()
    stored[start] = {name: _changed(value, _OnHost) for name, value in own.items()}
    return type(result)(**{name: value for name, value in result.items() if name not in own}) if own else result


def put_back(result: Any, stored: Stored, place: Callable[[Any, Any], Any]) -> Any:
    """Return the result of all rows with the stored fields of its parts in it, each tensor where ``place`` puts it.

    Raises:
        ValueError: parts differ in more than their images.
    """
    parts = [stored[start] for start in sorted(stored)]
    fields = {
        name: [part[name] for part in parts if name in part] for name in dict.fromkeys(n for p in parts for n in p)
    }
    joined = {name: _joined(values, place, depth=None) for name, values in fields.items()}
    return type(result)(**{**result, **joined}) if joined else result


class _OnHost:
    """A tensor that waits on the host, and the device that it came from."""

    def __init__(self, tensor: Any) -> None:
        self.device, self.tensor = tensor.device, torch_memory.to_host(tensor)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record with what ``change`` makes of each tensor in it."""
    if hasattr(value, "untyped_storage"):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)(**{name: _changed(entry, change) for name, entry in value.items()})
    return type(value)(_changed(entry, change) for entry in value) if type(value) in (list, tuple) else value


def _joined(values: list[Any], place: Callable[[Any, Any], Any], *, depth: int | None) -> Any:
    """Return several parts' records as one, each tensor along its first axis.

    ``depth`` is how many lists are around the one that has an entry for each image; None: there is none.
    """
    first = values[0]
    if isinstance(first, _OnHost):
        with torch_memory.on_host():
            whole = _cat([value.tensor for value in values])
        return place(whole, first.device)
    if any(type(value) is not type(first) for value in values):
        raise ValueError(_OTHERWISE)
    if isinstance(first, Mapping):
        depths = data()["outputs"]["listed"]
        named = {name: [value[name] for value in values] for name in first}
        return type(first)(**{name: _joined(each, place, depth=depths.get(name)) for name, each in named.items()})
    if type(first) in (list, tuple):
        entries = [entry for value in values for entry in value]
        if depth == 0 and all(isinstance(entry, _OnHost) for entry in entries):
            return type(first)(_joined([entry], place, depth=None) for entry in entries)
        if any(len(value) != len(first) for value in values):
            raise ValueError(_OTHERWISE)
        inner = None if depth is None else max(0, depth - 1)
        return type(first)(_joined(list(layer), place, depth=inner) for layer in zip(*values, strict=True))
    if any(value != first for value in values):
        raise ValueError(_OTHERWISE)
    return first


def _cat(tensors: list[Any]) -> Any:
    import torch

    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
