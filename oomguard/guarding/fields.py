"""A result that is a record of fields, each with one entry a row: a model's output, a tuple of tensors, its cache.

Each part's result is taken apart into tensors and what is around them, which must be the same in all parts. Every tensor has
its own place; in the end the record is made anew around them. A tensor that stands in several fields stays one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from oomguard.guarding.places import Place, place_for
from oomguard.guarding.rows import first_rows

# Objects from here hold a model's state, in attributes: caches and their layers.
_STATE_MODULE: Final = "transformers.cache_utils"
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_IN_STATE: Final = "the state in "


@dataclass(frozen=True, slots=True)
class FieldsPart:
    """The result of a part of ``rows`` rows.

    ``weight`` is what its mean loss weighs, infinite where the losses of parts add up, None where neither is known.
    """

    value: Any
    rows: int
    weight: float | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands for a tensor in a record that was taken apart."""

    number: int


@dataclass(frozen=True, slots=True)
class _Node:
    """What is around tensors: a type, what its entries are called, and the entries, taken apart themselves."""

    kind: type
    names: tuple[Any, ...]
    entries: tuple[Any, ...]


class Fields:
    """Where results that are records of fields are put.

    Args:
        total: rows of the whole call.
        is_parked: whether tensors wait on the host.
        several: how many entries a row may have in a field, beside one.
        layout: at which axis fields hold their rows, and how many entries a row has there, by name; others at the first.
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
        self._total, self._is_parked, self._several = total, is_parked, {1, *several}
        self._places: list[_OfRows | _Mean | _Shared] = []
        self._record: Any = None
        self._is_torn = False
        self._done = 0

    def add(self, part: FieldsPart) -> str | None:
        """Put each field of a part into its place; return why one cannot be, None where all were."""
        taken = _Taken()
        record = taken.apart(part.value, "its result")
        if taken.problem is not None:
            return taken.problem
        if self._record is None:
            named = taken.tensors  # a place for each of them, before anything is put there
            self._places = [self._place_for(name, tensor, part, is_loss=name == taken.loss) for name, tensor in named]
            self._record = record
        elif record != self._record:
            return "its results differ in more than their rows"
        if self._is_torn:
            return "its fields hold different rows"
        self._is_torn = True  # unless each of them takes the part
        for (name, tensor), place in zip(taken.tensors, self._places, strict=True):
            if (problem := place.add(tensor, part)) is not None:
                return f"{name} {problem}"
        self._is_torn = False
        self._done += part.rows
        return None

    def _place_for(self, name: str, tensor: Any, part: FieldsPart, *, is_loss: bool) -> _OfRows | _Mean | _Shared:
        is_count = tensor.dim() == 0 and name.startswith(_IN_STATE)
        if is_count or (tensor.numel() == 0 and tensor.dim() == 1):
            return _Shared(tensor)
        if tensor.dim() == 0:
            return _Mean(tensor, is_known=is_loss)
        axis, each = self._layout.get(name, (0, None))
        entries, more = divmod(tensor.shape[axis], part.rows)
        is_known = entries in self._several if each is None else each in (0, entries)
        if more or not is_known:
            return _OfRows(None)  # it says so when the part is put there
        first = tensor.movedim(axis, 0)
        return _OfRows(place_for(first, part.rows, self._total, None, is_parked=self._is_parked), entries, axis)

    @property
    def device_bytes(self) -> int:
        """Bytes that the fields hold on a device."""
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
    """A tensor with as many entries for each row."""

    def __init__(self, place: Place | None, entries: int = 1, axis: int = 0) -> None:
        self._place, self._entries, self._axis = place, entries, axis
        self._made: Any = None

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        if self._place is None or tensor.dim() <= self._axis or tensor.shape[self._axis] != part.rows * self._entries:
            return f"has the shape {tuple(tensor.shape)} for {part.rows} rows"
        if tensor.requires_grad:
            return "is part of a graph of gradients"
        problem = self._place.add(tensor.movedim(self._axis, 0))
        return None if problem is None else f"cannot be put together: {problem}"

    @property
    def device_bytes(self) -> int:
        return 0 if self._place is None else self._place.device_bytes

    def park(self) -> None:
        if self._place is not None:
            self._place.park()

    def result(self) -> Any:
        if self._place is None or not self._axis:
            return self._place and self._place.result()
        self._made, self._place = self._as_it_lay(self._place.result()), None  # not held twice
        return self._made

    def finished(self, rows: int) -> Any:
        if self._place is None:
            return self._made
        return self._as_it_lay(first_rows(self._place.finished(), rows * self._entries))

    def _as_it_lay(self, rows: Any) -> Any:
        return rows.movedim(0, self._axis).contiguous() if self._axis else rows


class _Mean:
    """One number for all rows: the mean of the parts' by weight, or their sum."""

    device_bytes = 0

    def __init__(self, like: Any, *, is_known: bool) -> None:
        self._like, self._is_known = like.detach().clone(), is_known
        self._sum = self._weight = 0.0
        self._is_sum = False
        self._after: dict[int, tuple[float, float]] = {}  # sum and weight, by the rows so far
        self._rows = 0

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        if tensor.dim() or part.weight is None or not self._is_known:
            return "is one number for all rows, and how to put several together is not known"
        if math.isinf(part.weight):
            self._sum, self._is_sum = self._sum + float(tensor), True
        elif part.weight:  # the mean of nothing is no number
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
        return None if after is None else self._number(*after)

    def _number(self, total: float, weight: float) -> Any:
        mean = total / weight if weight else float("nan")
        return self._like.clone().fill_(total if self._is_sum else mean)


class _Shared:
    """What has no rows, and must be the same in all parts."""

    device_bytes = 0

    def __init__(self, like: Any) -> None:
        self._like = like.clone()

    def add(self, tensor: Any, part: FieldsPart) -> str | None:
        del part
        same = (
            self._like.shape == tensor.shape and self._like.dtype == tensor.dtype and bool((self._like == tensor).all())
        )
        return None if same else "differs from part to part and has no rows"

    def park(self) -> None:
        return

    def result(self) -> Any:
        return self._like

    def finished(self, rows: int) -> Any:
        del rows
        return self._like


class _Taken:
    """The tensors of a record, in the order in which they stand in it, each once."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Any]] = []
        self.problem: str | None = None
        self.loss = ""
        self._numbers: dict[int, int] = {}

    def apart(self, value: Any, name: str, *, in_state: bool = False) -> Any:
        """Return what is around the tensors of a value; note them, and what cannot be taken apart as ``problem``."""
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
                self.problem = (
                    self.problem or f"{name} is a {type(value).__name__}: how to put several together is not known"
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
    """Return a record around these tensors, of the types that it was taken apart from."""
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
    return any(base.__module__ == _STATE_MODULE for base in type(value).__mro__) and hasattr(value, "__dict__")
