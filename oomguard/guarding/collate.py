"""Collate the results of parts as they come.

Joining them at the end would need twice the memory. A part's result is copied, so that a view
(``logits[:, -1]``) releases its larger storage. If the device has no space for the results they
wait on the host; tokens always do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

from oomguard.engines.protocol import WatchedCall
from oomguard.probe import torch_memory

# A kind of value with its own way to cut or join is a row in ``_FRAMES``, or a function next to
# ``entries`` and ``cut``.


# Table libraries whose entries are rows, although a slice may mean labels; each has ``concat``.
_FRAMES: Final = frozenset({"pandas", "polars", "cudf", "modin"})
# Values that are one thing, however many entries they have.
_WHOLE: Final = (str, bytes, bytearray, Mapping, Set)


def library(value: Any) -> str:
    """Return the name of the library that defines a value's type."""
    return type(value).__module__.partition(".")[0]


def is_frame(value: Any) -> bool:
    """Return whether a value is a table, or a column of one."""
    return is_arrow_table(value) or (library(value) in _FRAMES and hasattr(value, "shape"))


def is_arrow_table(value: Any) -> bool:
    """Return whether a value is an Arrow table; slices of Arrow's other types are not rows."""
    return library(value) == "pyarrow" and type(value).__name__ == "Table"


def entries(value: Any) -> int | None:
    """Return how many rows a value may hold; None for a text, number, mapping, model or class."""
    # Some models have a length, such as torch's Sequential, but no rows.
    if isinstance(value, (*_WHOLE, type)) or hasattr(value, "parameters"):
        return None
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape):
            return int(shape[0])
        return None
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return len(value)
    return None


def is_columns(value: Any) -> bool:
    """Return whether a value is a mapping of columns, such as a dict or a BatchEncoding."""
    return isinstance(value, Mapping) and not hasattr(value, "shape")


def rows_of(value: Any) -> int:
    """Return how many rows an argument holds: the longest column of a mapping, otherwise 0."""
    if is_columns(value):
        columns = value.values()
    else:
        columns = (value,)
    return max((entries(column) or 0 for column in columns), default=0)


def why_not_cut(name: str, value: Any) -> str | None:
    """Return why ``cut`` cannot split an argument into values of its own type; None if it can."""
    if not is_columns(value):
        needed = "not a list, a tensor, or a dict of them"
        if _can_be_cut(value):
            return None
        return f"the argument {name} is {needed}"
    for key, column in value.items():
        if not _can_be_cut(column):
            return f"{key!r} in the argument {name} is not a list or a tensor"
    sizes = {key: entries(column) for key, column in value.items()}
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{key!r} {size}" for key, size in sizes.items())
        return f"the entries of the argument {name} have different lengths: {lengths}"
    if with_columns(value, dict(value)) is None:
        return (
            f"the argument {name} has the type {type(value).__name__}, which cannot be made with "
            "fewer rows: pass a dict"
        )
    return None


def _can_be_cut(value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) or (
        hasattr(value, "shape") and len(value.shape) > 0
    )


def cut(value: Any, start: int, stop: int) -> Any:
    """Return entries ``start`` to ``stop`` by position, or those of each column of a mapping."""
    if is_columns(value):
        part = with_columns(value, {key: cut(column, start, stop) for key, column in value.items()})
        for name, beside in lists_beside(value).items():
            setattr(part, name, beside[start:stop])
        return part
    # A plain slice of a pandas object may mean labels.
    if hasattr(value, "iloc"):
        return value.iloc[start:stop]
    return value[start:stop]


def with_columns(value: Any, columns: dict[Any, Any]) -> Any:
    """Return a new mapping of the same type with these columns; None if the type cannot."""
    # A copy keeps the type's own attributes, and shares no column with the original.
    if isinstance(value, (dict, UserDict)):
        part = copy.copy(value)
        part.update(columns)
        return part
    # The constructor is the user's own, and may want other arguments.
    with contextlib.suppress(Exception):
        made = type(value)(columns)
        if list(made) == list(columns) and all(map(operator.is_, made.values(), columns.values())):
            return made
    return None


def lists_beside(value: Any) -> dict[str, list[Any]]:
    """Return an object's attributes that are lists with one entry per row (BatchEncoding)."""
    if not isinstance(value, UserDict):
        return {}
    rows = rows_of(value)
    lists = {}
    for name, beside in vars(value).items():
        if isinstance(beside, list) and len(beside) == rows:
            lists[name] = beside
    return lists


def first_rows(value: Any, rows: int) -> Any:
    """Return the first rows of a field, which may have those of a part that another lacks."""
    if entries(value) == rows:
        return value
    return cut(value, 0, rows)


def is_record(result: Any, rows: int, *, is_known: bool = False) -> bool:
    """Return whether a result is a record of fields, each with one entry per row.

    It is a mapping, or a tuple that cannot be a list of rows. ``is_known``: another part's result
    is a record, so a tuple with as many fields as rows is one too.
    """
    if is_columns(result):
        if with_columns(result, dict(result)) is not None:
            fields = list(result.values())
        else:
            fields = []
    elif isinstance(result, tuple) and (is_known or len(result) != rows):
        fields = list(result)
    else:
        fields = []
    return bool(fields) and all(_is_field_of(field, rows) for field in fields)


def why_not_rows(result: Any, rows: int, *, is_known_record: bool = False) -> str | None:
    """Return why a result does not have one entry per row, itself or by field; None if so."""
    if is_record(result, rows, is_known=is_known_record):
        return None
    if not _is_field(result):
        needed = (
            "oomguard needs a list, tuple, tensor, array or table with one entry per row, or a "
            "dict of them"
        )
        return f"its result is a {type(result).__name__}: {needed}"
    size = entries(result)
    if isinstance(result, tuple) and all(_is_field_of(entry, rows) for entry in result):
        return (
            f"its result is a tuple of {size} values with {rows} entries each, which may be fields "
            "or rows"
        )
    if size != rows:
        return f"its result has {size} entries for {rows} rows"
    return None


def _is_field_of(value: Any, rows: int) -> bool:
    return _is_field(value) and entries(value) == rows


def _is_field(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or can_be_joined(value)


def can_be_joined(result: Any) -> bool:
    """Return whether results like this one can be joined into one of the same type."""
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) == 0:
        return False
    if hasattr(result, "untyped_storage") or is_frame(result):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(result, numpy.ndarray):
        # Another type may have state besides its values.
        return type(result) in (numpy.ndarray, numpy.ma.MaskedArray)
    return hasattr(result, "__array_namespace__")


# Tensors and arrays go into one buffer for all rows, other values into a list. A new kind is a
# class with the methods of ``ResultBuffer``, and a case in ``place_for``.


class ResultBuffer(Protocol):
    """A buffer for results of one kind: ``add`` in row order, then ``result`` for all rows."""

    def add(self, part: Any) -> str | None:
        """Add the next part's result; return why it cannot be joined, None if it can."""

    @property
    def device_bytes(self) -> int:
        """The device bytes that moving to the host would free."""

    def park(self) -> None:
        """Move the results to the host, and later ones too."""

    def result(self) -> Any:
        """Return all rows as one value, on the function's device."""

    def finished(self) -> Any:
        """Return the finished rows as one value, without a move or a larger storage."""


def place_for(
    part: Any, rows: int, total: int, pad_value: int | None, *, is_parked: bool
) -> ResultBuffer:
    """Return a buffer for the results of ``total`` rows, like ``part``, the first ``rows`` rows."""
    if isinstance(part, (list, tuple)):
        return _Rows(is_tuple=isinstance(part, tuple), is_parked=is_parked)
    if hasattr(part, "untyped_storage"):
        import torch

        if type(part) is torch.Tensor and part.layout is torch.strided:
            per_row = part.shape[0] // max(1, rows)
            return _PlacesTensor(part, total * per_row, pad_value, is_parked=is_parked)
        # A subclass or a sparse tensor has no storage into which rows could be written.
        return _Parts(torch.cat)
    if is_frame(part):
        return _Parts(_concat_frames)
    if library(part) == "numpy":
        import numpy as np

        if type(part) is np.ndarray:
            return _Array(part, total)
        # The plain function would drop the mask of a masked array.
        return _Parts(np.ma.concatenate)
    return _Parts(part.__array_namespace__().concat)


def place_result(host: Any, device: Any) -> Any:
    """Return a host tensor on its device; it may run out of memory there."""
    return torch_memory.from_host(host, device)


class _PlacesTensor:
    """One tensor for all rows, on the parts' device, or on the host if that has no space."""

    def __init__(self, like: Any, rows: int, pad_value: int | None, *, is_parked: bool) -> None:
        import torch

        self._rows = rows
        self._pad_value = pad_value
        self._device = like.device
        self._done = 0
        self._is_parked = is_parked
        shape = (rows, *like.shape[1:])
        try:
            self._out = self._empty(shape, like)
        # Some devices raise a plain RuntimeError when they run out of memory.
        except (torch.OutOfMemoryError, RuntimeError):
            self._is_parked = True
            self._out = self._empty(shape, like)

    def add(self, part: Any) -> str | None:
        if part.dtype != self._out.dtype:
            return f"its results are of different types, {self._out.dtype} and {part.dtype}"
        if part.shape[1:] != self._out.shape[1:] and not self._lengthen(part):
            return (
                f"its results have different shapes per row: {tuple(self._out.shape[1:])} and "
                f"{tuple(part.shape[1:])}"
            )
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
        if self._is_parked or not torch_memory.counts(self._out):
            return 0
        return int(self._out.nbytes)

    def park(self) -> None:
        if not self._is_parked:
            self._is_parked = True
            self._out = self._moved(self._out)

    def result(self) -> Any:
        if not self._is_parked:
            return self._out
        return place_result(self._out, self._device)

    def finished(self) -> Any:
        """Return the finished rows.

        Pickling a view saves its whole storage, so a part of the rows is copied to the host.
        """
        if self._done == self._out.shape[0]:
            return self._out
        with torch_memory.on_host():
            return self._out[: self._done].to("cpu", copy=True)

    def _lengthen(self, part: Any) -> bool:
        """Extend the buffer for longer rows; return False if rows have a fixed length."""
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
            return torch.empty(
                shape, dtype=like.dtype, device="cpu" if self._is_parked else self._device
            )

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
            return (
                f"its results have different shapes, {self._out.shape[1:]} and {part.shape[1:]} a "
                "row"
            )
        self._out[self._done : self._done + part.shape[0]] = part
        self._done += part.shape[0]
        return None

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._out

    def finished(self) -> Any:
        if self._done == len(self._out):
            return self._out
        return self._out[: self._done].copy()


class _Parts:
    """Parts that their own library joins at the end."""

    device_bytes = 0

    def __init__(self, join: Callable[[list[Any]], Any]) -> None:
        self._join = join
        self._parts = list[Any]()

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
    """A list or tuple of rows; tensors in it that are views of something larger are copied."""

    def __init__(self, *, is_tuple: bool, is_parked: bool) -> None:
        self._rows: list[Any] = []
        self._is_tuple = is_tuple
        self._is_parked = is_parked
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
        tensors = {}
        for tensor in _tensors(self._rows):
            if torch_memory.counts(tensor):
                tensors[id(tensor)] = tensor
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
        def placed(host: Any) -> Any:
            return torch_memory.from_host(host, self._devices[id(host)])

        rows = self._rows
        if self._is_parked:
            rows = [_mapped(row, placed) for row in rows]
        if self._is_tuple:
            return tuple(rows)
        return rows

    def finished(self) -> Any:
        if self._is_tuple:
            return tuple(self._rows)
        return list(self._rows)


def _concat_frames(parts: list[Any]) -> Any:
    """Return tables as one; if each numbers its rows from 0, so does the whole."""
    if is_arrow_table(parts[0]):
        return sys.modules["pyarrow"].concat_tables(parts)
    concat = sys.modules[library(parts[0])].concat
    if hasattr(parts[0], "iloc") and all(map(_is_numbered, parts)):
        return concat(parts, ignore_index=True)
    return concat(parts)


def _is_numbered(frame: Any) -> bool:
    """Return whether a table numbers its rows from 0, or has no row labels."""
    index = getattr(frame, "index", None)
    return index is None or list(index) == list(range(len(index)))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with ``change`` applied to its tensors, in lists, tuples and dicts too."""
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
    """Return rows whose tensors own their storage; views of a larger storage are copied."""
    shown: dict[int, int] = {}
    for tensor in _tensors(rows):
        if _is_plain(tensor):
            key = tensor.untyped_storage().data_ptr()
            shown[key] = shown.get(key, 0) + tensor.nbytes

    def own(tensor: Any) -> Any:
        if not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if shown.get(storage.data_ptr(), 0) < storage.nbytes():
            return tensor.clone()
        return tensor

    return [_mapped(row, own) for row in rows]


def _is_plain(tensor: Any) -> bool:
    return bool(tensor.layout is sys.modules["torch"].strided) and entries(tensor) != 0


# A result may be a record of fields with one entry per row: a model's output, a tuple of tensors, a
# KV cache. Each part's result is split into tensors and the structure around them, which must be
# the same in all parts. Every tensor has its own buffer, and the record is rebuilt at the end. A
# tensor in several fields stays one tensor.

# The modules whose objects keep a model's state in attributes: caches and their layers.
_STATE_MODULE: Final = "transformers.cache_utils"
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_IN_STATE: Final = "the state in "


@dataclass(frozen=True, slots=True)
class FieldsPart:
    """The result of a part of ``rows`` rows.

    ``weight`` is the weight of its mean loss: infinite if the losses of parts add up, None if
    unknown.
    """

    value: Any
    rows: int
    weight: float | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A placeholder for a tensor in a record's structure."""

    number: int


@dataclass(frozen=True, slots=True)
class _Node:
    """The structure around tensors: a type, the names of its entries, and the entries."""

    kind: type
    names: tuple[Any, ...]
    entries: tuple[Any, ...]


class Fields:
    """A buffer for results that are records of fields.

    Args:
        total: the rows of the whole call.
        is_parked: whether tensors wait on the host.
        several: other numbers of entries per row in a field.
        layout: the row axis and the entries per row by field; other fields have rows on the first
            axis.
    """

    def __init__(
        self,
        total: int,
        *,
        is_parked: bool,
        several: Collection[int] = (),
        layout: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._layout = layout
        self._total = total
        self._is_parked = is_parked
        self._several = {1, *several}
        self._places: list[_OfRows | _Mean | _Shared] = []
        self._record: Any = None
        self._is_torn = False
        self._done = 0

    def add(self, part: FieldsPart) -> str | None:
        """Add each field of a part; return why one cannot be added, None if all were."""
        taken = _Taken()
        record = taken.apart(part.value, "its result")
        if taken.problem is not None:
            return taken.problem
        if self._record is None:
            # All buffers are made before anything is added, because making one may fail.
            self._places = []
            for name, tensor in taken.tensors:
                place = self._place_for(name, tensor, part, is_loss=name == taken.loss)
                self._places.append(place)
            self._record = record
        elif record != self._record:
            return "its results differ in more than their rows"
        if self._is_torn:
            return "its fields hold different rows"
        # Until each buffer has the part, an exception leaves fields of different lengths.
        self._is_torn = True
        for (name, tensor), place in zip(taken.tensors, self._places, strict=True):
            if (problem := place.add(tensor, part)) is not None:
                return f"{name} {problem}"
        self._is_torn = False
        self._done += part.rows
        return None

    def _place_for(
        self, name: str, tensor: Any, part: FieldsPart, *, is_loss: bool
    ) -> _OfRows | _Mean | _Shared:
        is_count = tensor.dim() == 0 and name.startswith(_IN_STATE)
        if is_count or (tensor.numel() == 0 and tensor.dim() == 1):
            return _Shared(tensor)
        if tensor.dim() == 0:
            return _Mean(tensor, is_known=is_loss)
        axis, each = self._layout.get(name, (0, None))
        entries, more = divmod(tensor.shape[axis], part.rows)
        if each is None:
            is_known = entries in self._several
        else:
            is_known = each in (0, entries)
        if more or not is_known:
            # It reports the problem when the part is added.
            return _OfRows(None)
        first = tensor.movedim(axis, 0)
        return _OfRows(
            place_for(first, part.rows, self._total, None, is_parked=self._is_parked), entries, axis
        )

    @property
    def device_bytes(self) -> int:
        """The device bytes of the fields."""
        return sum(place.device_bytes for place in self._places)

    def park(self) -> None:
        """Move the fields to the host."""
        self._is_parked = True
        for place in self._places:
            place.park()

    def result(self) -> Any:
        """Return the record of all rows."""
        return _made(self._record, [place.result() for place in self._places])

    def finished(self) -> Any:
        """Return the record of the rows that all fields have."""
        return _made(self._record, [place.finished(self._done) for place in self._places])


class _OfRows:
    """A tensor with the same number of entries for each row."""

    def __init__(self, place: ResultBuffer | None, entries: int = 1, axis: int = 0) -> None:
        self._place = place
        self._entries = entries
        self._axis = axis
        self._made: Any = None

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        if (
            self._place is None
            or tensor.dim() <= self._axis
            or tensor.shape[self._axis] != part.rows * self._entries
        ):
            return f"has the shape {tuple(tensor.shape)} for {part.rows} rows"
        if tensor.requires_grad:
            return "is part of a graph of gradients"
        problem = self._place.add(tensor.movedim(self._axis, 0))
        if problem is None:
            return None
        return f"cannot be put together: {problem}"

    @property
    def device_bytes(self) -> int:
        if self._place is None:
            return 0
        return self._place.device_bytes

    def park(self) -> None:
        if self._place is not None:
            self._place.park()

    def result(self) -> Any:
        if self._place is None or not self._axis:
            return self._place and self._place.result()
        # Only one of the two keeps the tensor.
        self._made = self._as_it_lay(self._place.result())
        self._place = None
        return self._made

    def finished(self, rows: int) -> Any:
        if self._place is None:
            return self._made
        return self._as_it_lay(first_rows(self._place.finished(), rows * self._entries))

    def _as_it_lay(self, rows: Any) -> Any:
        if self._axis:
            return rows.movedim(0, self._axis).contiguous()
        return rows


class _Mean:
    """One number for all rows: the weighted mean of the parts' numbers, or their sum."""

    device_bytes = 0

    def __init__(self, like: Any, *, is_known: bool) -> None:
        self._like = like.detach().clone()
        self._is_known = is_known
        self._sum = self._weight = 0.0
        self._is_sum = False
        # Sum and weight by finished rows.
        self._after: dict[int, tuple[float, float]] = {}
        self._rows = 0

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        if tensor.dim() or part.weight is None or not self._is_known:
            return "is one number for all rows, and how to put several together is not known"
        if math.isinf(part.weight):
            self._sum = self._sum + float(tensor)
            self._is_sum = True
        elif part.weight:  # a mean over nothing is NaN
            self._sum += float(tensor) * part.weight
            self._weight += part.weight
        self._rows += part.rows
        self._after[self._rows] = self._sum, self._weight
        return None

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._number(self._sum, self._weight)

    def finished(self, rows: int) -> Any:
        after = self._after.get(rows)
        if after is None:
            return None
        return self._number(*after)

    def _number(self, total: float, weight: float) -> Any:
        if weight:
            mean = total / weight
        else:
            mean = float("nan")
        return self._like.clone().fill_(total if self._is_sum else mean)


class _Shared:
    """A value without rows, which must be the same in all parts."""

    device_bytes = 0

    def __init__(self, like: Any) -> None:
        self._like = like.clone()

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        del part
        same = (
            self._like.shape == tensor.shape
            and self._like.dtype == tensor.dtype
            and bool((self._like == tensor).all())
        )
        if same:
            return None
        return "differs from part to part and has no rows"

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._like

    def finished(self, rows: int) -> Any:
        del rows
        return self._like


class _Taken:
    """The tensors of a record in their order, each once."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Any]] = []
        self.problem: str | None = None
        self.loss = ""
        self._numbers: dict[int, int] = {}

    def apart(self, value: Any, name: str, *, in_state: bool = False) -> Any:
        """Return the structure around a value's tensors, and collect the tensors.

        ``problem`` says what cannot be split.
        """
        if hasattr(value, "untyped_storage"):
            return self._tensor(value, f"{_IN_STATE}{name}" if in_state else name)
        if isinstance(value, Mapping):
            if not self.loss and hasattr(value.get("loss"), "untyped_storage"):
                self.loss = f"{name}['loss']"
            named = [(key, f"{name}[{key!r}]", entry) for key, entry in value.items()]
        elif isinstance(value, (list, tuple)):
            if isinstance(value, tuple) and not self.loss and name == "its result":
                self.loss = f"{name}[0]"
            named = [(number, f"{name}[{number}]", entry) for number, entry in enumerate(value)]
        elif _is_state(value):
            in_state = True
            named = [(key, f"{name}.{key}", entry) for key, entry in vars(value).items()]
        else:
            if not in_state and not isinstance(value, _PLAIN):
                self.problem = self.problem or (
                    f"{name} is a {type(value).__name__}, which oomguard cannot join"
                )
            return value
        entries = tuple(self.apart(entry, path, in_state=in_state) for _, path, entry in named)
        return _Node(type(value), tuple(key for key, _, _ in named), entries)

    def _tensor(self, tensor: Any, name: str) -> _Tensor:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append((name, tensor))
        return _Tensor(self._numbers[id(tensor)])


def _made(record: Any, values: list[Any]) -> Any:
    """Return a record of the original types around these tensors."""
    if isinstance(record, _Tensor):
        return values[record.number]
    if not isinstance(record, _Node):
        return record
    entries = [_made(entry, values) for entry in record.entries]
    if issubclass(record.kind, Mapping):
        named = dict(zip(record.names, entries, strict=True))
        return record.kind(**named) if dataclasses.is_dataclass(record.kind) else record.kind(named)  # type: ignore[call-arg]
    if hasattr(record.kind, "_fields"):
        return record.kind(*entries)
    if issubclass(record.kind, (list, tuple)):
        return record.kind(entries)
    state = object.__new__(record.kind)
    vars(state).update(zip(record.names, entries, strict=True))
    return state


def _is_state(value: Any) -> bool:
    return any(base.__module__ == _STATE_MODULE for base in type(value).__mro__) and hasattr(
        value, "__dict__"
    )


# Results of user functions may be records: a mapping or a tuple of fields with one entry per row.


def place_of(
    part: Any, rows: int, total: int, pad_value: int | None, *, is_parked: bool
) -> ResultBuffer:
    """Return a buffer for the results of ``total`` rows, like ``part``, the first ``rows`` rows."""
    if is_record(part, rows):
        return RecordBuffer(part, rows, total, is_parked=is_parked)
    return place_for(part, rows, total, pad_value, is_parked=is_parked)


class RecordBuffer:
    """A buffer for each field of a record, and the record's type."""

    def __init__(self, like: Any, rows: int, total: int, *, is_parked: bool) -> None:
        self._kind: Any = type(like)
        if isinstance(like, (dict, UserDict)):
            self._empty = _emptied(like)
        else:
            self._empty = None
        self._names = _names_in(like)
        self._beside: dict[str, list[Any]] = {name: [] for name in lists_beside(like)}
        self._done = 0
        self._places: list[ResultBuffer] = []
        for name in self._names:
            self._places.append(place_for(like[name], rows, total, None, is_parked=is_parked))

    def add(self, part: Any) -> str | None:
        """Add each field to its buffer; return why one cannot be added."""
        beside = lists_beside(part)
        if (
            type(part) is not self._kind
            or _names_in(part) != self._names
            or beside.keys() != self._beside.keys()
        ):
            return "its results have different fields"
        for name, place in zip(self._names, self._places, strict=True):
            problem = place.add(part[name])
            if problem is not None:
                return problem
        for name, values in beside.items():
            self._beside[name] += values
        self._done += rows_of(part[self._names[0]])
        return None

    @property
    def device_bytes(self) -> int:
        """The device bytes of the fields."""
        return sum(place.device_bytes for place in self._places)

    def park(self) -> None:
        """Move the fields to the host."""
        for place in self._places:
            place.park()

    def result(self) -> Any:
        """Return the record of all rows."""
        return self._made([place.result() for place in self._places])

    def finished(self) -> Any:
        """Return the record of the rows that all fields have."""
        return self._made([first_rows(place.finished(), self._done) for place in self._places])

    def _made(self, fields: list[Any]) -> Any:
        if issubclass(self._kind, Mapping):
            entries = dict(zip(self._names, fields, strict=True))
            if self._empty is None:
                return self._kind(entries)
            made = copy.copy(self._empty)
            made.update(entries)
            for name, beside in self._beside.items():
                setattr(made, name, list(beside))
            return made
        if hasattr(self._kind, "_fields"):
            return self._kind(*fields)
        return self._kind(fields)


def _names_in(record: Any) -> list[Any]:
    if isinstance(record, Mapping):
        return list(record)
    return list(range(len(record)))


def _emptied(like: Any) -> Any:
    """Return an empty copy of a dict with its own state (``defaultdict``); None for other dicts."""
    kind: Any = type(like)
    try:
        kind(())
    except Exception:  # noqa: BLE001 - the user's own type may raise anything
        is_made_of_entries = False
    else:
        is_made_of_entries = isinstance(like, dict)
    if is_made_of_entries:
        return None
    empty = copy.copy(like)
    empty.clear()
    return empty


class OutputCollector:
    """The results of one call's parts, whose kind the first part determines.

    Args:
        rows: the rows of the whole call.
        pad_value: the value that fills shorter rows; None: all rows have one length.
        weigh: the weight of a part's mean loss, if results are records of fields; None: they are
            not.
        on_host: whether results wait on the host from the start.
        several: other numbers of entries per row in a field.
        layout: the row axis and the entries per row by field, as far as known.
    """

    def __init__(
        self,
        rows: int,
        pad_value: int | None = None,
        weigh: Callable[[Any, int, int], float | None] | None = None,
        *,
        on_host: bool = False,
        several: Collection[int] = (),
        layout: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._layout = layout
        self.rows = rows
        self._pad_value = pad_value
        self._weigh = weigh
        self._several = several
        self.done = 0
        self.is_parked = on_host
        self._place: ResultBuffer | None = None

    @classmethod
    def of(cls, call: WatchedCall) -> OutputCollector:
        """Return the buffer for a call that has not run."""
        return cls(
            call.rows,
            call.pad_value,
            call.weigh,
            on_host=call.waits_on_host,
            several=call.several,
            layout=call.layout,
        )

    def add(self, part: Any, rows: int) -> str | None:
        """Add the result of the next ``rows`` rows; return why that is impossible, None if not."""
        if self._weigh is not None:
            part = FieldsPart(part, rows, self._weigh(part, self.done, self.done + rows))
            self._place = self._place or Fields(
                self.rows, is_parked=self.is_parked, several=self._several, layout=self._layout
            )
        elif self._place is None:
            self._place = place_of(part, rows, self.rows, self._pad_value, is_parked=self.is_parked)
        problem = self._place.add(part)
        if problem is None:
            self.done += rows
        return problem

    def take(self, call: WatchedCall, part: Any, rows: int) -> str | None:
        """Add a call's result for the next rows, as its variant completes it; see ``add``."""
        return self.add(call.completed(part, self.done, self.done + rows), rows)

    @property
    def device_bytes(self) -> int:
        """The device bytes of the results; 0 if they are on the host, or there are none."""
        if self._place is None or self.is_parked:
            return 0
        return self._place.device_bytes

    def park(self) -> None:
        """Move the results to the host, and later ones too."""
        self.is_parked = True
        if self._place is not None:
            self._place.park()

    def result(self) -> Any:
        """Return all rows in order; this may run out of memory if they waited on the host."""
        assert self._place is not None  # noqa: S101 - a split call has parts
        return self._place.result()

    def result_of(self, call: WatchedCall) -> Any:
        """Return all rows as the whole call would return them; this may run out of memory too."""
        return call.finished(self.result(), place_result)

    def finished(self) -> Any:
        """Return the finished rows in order; None before the first."""
        if self._place is None:
            return None
        return self._place.finished()
