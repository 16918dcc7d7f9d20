"""Where results of each kind are put: tensors and arrays into one that was made for all rows, the rest side by side.

A new kind is a class with the methods of ``Place``, and a line in ``place_for``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from oomguard.guarding.rows import entries, is_arrow_table, is_frame, library
from oomguard.observe import torch_memory


class Place(Protocol):
    """Where results of one kind are put: ``add`` in the order of the rows, ``result`` gives them as one."""

    def add(self, part: Any) -> str | None:
        """Take the next part's result; return why it cannot stand beside the others, None where it does."""

    @property
    def device_bytes(self) -> int:
        """Bytes that it holds on a device, and would not on the host."""

    def park(self) -> None:
        """Move what it holds to the host; all that is added later goes there too."""

    def result(self) -> Any:
        """Return all rows as one, where the function would have put them."""

    def finished(self) -> Any:
        """Return the rows so far as one, where they are, and nothing larger than they are."""


def place_for(part: Any, rows: int, total: int, pad_value: int | None, *, is_parked: bool) -> Place:
    """Return where the results of a call of ``total`` rows go, whose first part of ``rows`` rows gave ``part``."""
    if isinstance(part, (list, tuple)):
        return _Rows(is_tuple=isinstance(part, tuple), is_parked=is_parked)
    if hasattr(part, "untyped_storage"):
        import torch

        if type(part) is torch.Tensor and part.layout is torch.strided:
            per_row = part.shape[0] // max(1, rows)
            return _Tensor(part, total * per_row, pad_value, is_parked=is_parked)
        return _Parts(torch.cat)
    if is_frame(part):
        return _Parts(_concat_frames)
    if library(part) == "numpy":
        import numpy as np

        return _Array(part, total) if type(part) is np.ndarray else _Parts(np.ma.concatenate)
    return _Parts(part.__array_namespace__().concat)


def place_result(host: Any, device: Any) -> Any:
    """Return a tensor of the host on its device; it may run out of memory there."""
    return torch_memory.from_host(host, device)


class _Tensor:
    """One tensor for all rows, on the device of the parts, or on the host where that has no room."""

    def __init__(self, like: Any, rows: int, pad_value: int | None, *, is_parked: bool) -> None:
        import torch

        self._rows, self._pad_value, self._device = rows, pad_value, like.device
        self._done = 0
        self._is_parked = is_parked
        shape = (rows, *like.shape[1:])
        try:
            self._out = self._empty(shape, like)
        except (torch.OutOfMemoryError, RuntimeError):
            self._is_parked = True
            self._out = self._empty(shape, like)

    def add(self, part: Any) -> str | None:
        if part.dtype != self._out.dtype:
            return f"its results are of different types, {self._out.dtype} and {part.dtype}"
        if part.shape[1:] != self._out.shape[1:] and not self._lengthen(part):
            return f"its results have different shapes, {tuple(self._out.shape[1:])} and {tuple(part.shape[1:])} a row"
        stop = self._done + part.shape[0]
        with self._where():
            target = self._out[self._done : stop]
            if self._pad_value is not None and part.shape[1:] != target.shape[1:]:
                target[:, part.shape[1] :] = self._pad_value
                target = target[:, : part.shape[1]]
            target.copy_(part)
        self._done = stop
        return None

    @property
    def device_bytes(self) -> int:
        return 0 if self._is_parked or not torch_memory.counts(self._out) else int(self._out.nbytes)

    def park(self) -> None:
        if not self._is_parked:
            self._is_parked = True
            self._out = self._moved(self._out)

    def result(self) -> Any:
        if not self._is_parked:
            return self._out
        return place_result(self._out, self._device)

    def finished(self) -> Any:
        """Return the finished rows; what is pickled of a view is all of its storage, so fewer than all are copied to the host."""
        if self._done == self._out.shape[0]:
            return self._out
        with torch_memory.on_host():
            return self._out[: self._done].to("cpu", copy=True)

    def _lengthen(self, part: Any) -> bool:
        """Make room for rows that are longer than those before them; False where rows have one length."""
        if self._pad_value is None or part.dim() != 2:
            return False
        if part.shape[1] > self._out.shape[1]:
            longer = self._empty((self._rows, part.shape[1]), self._out)
            with self._where():
                longer[: self._done, : self._out.shape[1]] = self._out[: self._done]
                longer[: self._done, self._out.shape[1] :] = self._pad_value
            self._out = longer
        return True

    def _empty(self, shape: tuple[int, ...], like: Any) -> Any:
        import torch

        with self._where():
            return torch.empty(shape, dtype=like.dtype, device="cpu" if self._is_parked else self._device)

    def _moved(self, tensor: Any) -> Any:
        with torch_memory.on_host():
            return tensor.to("cpu", copy=True)

    def _where(self) -> Any:
        return torch_memory.on_host(really=self._is_parked)


class _Array:
    """One numpy array for all rows."""

    device_bytes = 0

    def __init__(self, like: Any, rows: int) -> None:
        import numpy as np

        self._out = np.empty((rows, *like.shape[1:]), like.dtype)
        self._done = 0

    def add(self, part: Any) -> str | None:
        if part.dtype != self._out.dtype:
            return f"its results are of different types, {self._out.dtype} and {part.dtype}"
        if part.shape[1:] != self._out.shape[1:]:
            return f"its results have different shapes, {self._out.shape[1:]} and {part.shape[1:]} a row"
        self._out[self._done : self._done + part.shape[0]] = part
        self._done += part.shape[0]
        return None

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._out

    def finished(self) -> Any:
        return self._out if self._done == len(self._out) else self._out[: self._done].copy()


class _Parts:
    """Parts of a kind that is joined by its own library in the end."""

    device_bytes = 0

    def __init__(self, join: Callable[[list[Any]], Any]) -> None:
        self._join, self._parts = join, list[Any]()

    def add(self, part: Any) -> str | None:
        self._parts.append(part)
        return None

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._join(self._parts)

    def finished(self) -> Any:
        return self._join(self._parts)


class _Rows:
    """A list of rows, or a tuple; tensors in them that are views of something larger are copied."""

    def __init__(self, *, is_tuple: bool, is_parked: bool) -> None:
        self._rows: list[Any] = []
        self._is_tuple, self._is_parked = is_tuple, is_parked
        self._devices: dict[int, Any] = {}

    def add(self, part: Any) -> str | None:
        rows = _without_views(list(part))
        first = len(self._rows)
        self._rows += rows
        if self._is_parked:
            self._park_from(first)
        return None

    @property
    def device_bytes(self) -> int:
        tensors = {id(tensor): tensor for tensor in _tensors(self._rows) if torch_memory.counts(tensor)}
        return sum(tensor.nbytes for tensor in tensors.values())

    def park(self) -> None:
        if not self._is_parked:
            self._is_parked = True
            self._park_from(0)

    def _park_from(self, first: int) -> None:
        def parked(tensor: Any) -> Any:
            with torch_memory.on_host():
                host = tensor.to("cpu", copy=True)
            self._devices[id(host)] = tensor.device
            return host

        for number in range(first, len(self._rows)):
            self._rows[number] = _mapped(self._rows[number], parked)

    def result(self) -> Any:
        rows = self._rows
        if self._is_parked:
            devices = self._devices
            rows = [_mapped(row, lambda host: torch_memory.from_host(host, devices[id(host)])) for row in rows]
        return tuple(rows) if self._is_tuple else rows

    def finished(self) -> Any:
        return tuple(self._rows) if self._is_tuple else list(self._rows)


def _concat_frames(parts: list[Any]) -> Any:
    """Return tables as one; where each numbers its rows from 0 the whole does, as one call would have made it."""
    if is_arrow_table(parts[0]):
        return sys.modules["pyarrow"].concat_tables(parts)
    concat = sys.modules[library(parts[0])].concat
    indexes = [getattr(part, "index", None) for part in parts]
    if hasattr(parts[0], "iloc") and all(
        list(index) == list(range(len(index))) for index in indexes if index is not None
    ):
        return concat(parts, ignore_index=True)
    return concat(parts)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with ``change`` made to the tensors in it, through lists, tuples and dicts."""
    if hasattr(value, "untyped_storage"):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(entry, change) for entry in value)
    if type(value) is dict:
        return {key: _mapped(entry, change) for key, entry in value.items()}
    return value


def _tensors(value: Any) -> list[Any]:
    found: list[Any] = []

    def note(tensor: Any) -> Any:
        found.append(tensor)
        return tensor

    _mapped(value, note)
    return found


def _without_views(rows: list[Any]) -> list[Any]:
    """Return rows whose tensors hold no more than they show: where a storage is larger than what is seen of it, they are copied."""
    shown: dict[int, int] = {}
    for tensor in _tensors(rows):
        if _is_plain(tensor):
            key = tensor.untyped_storage().data_ptr()
            shown[key] = shown.get(key, 0) + tensor.nbytes

    def own(tensor: Any) -> Any:
        if not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        return tensor.clone() if shown.get(storage.data_ptr(), 0) < storage.nbytes() else tensor

    return [_mapped(row, own) for row in rows]


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.layout is sys.modules["torch"].strided) and entries(tensor) != 0
