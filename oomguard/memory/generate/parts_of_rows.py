"""Rows that the user's own code takes apart: those that it names by number, and those that meet others again.

``p[-1] = 0``, ``p[40:] += 1`` write to some rows by their place alone; a loop that comes to each of them (``out[i] = ...``, some at a
time) names none. What a loop carries from one row to the next (``carry = carry / 2 + row``) makes one row of another. As
fake_generate.py this imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch

from oomguard.memory.generate.known_values import name_of, written
from oomguard.memory.generate.origin import PLACE, Origin
from oomguard.memory.generate.rows_mixed import arguments_of

# What is given where a slice goes to the end.
_TO_THE_END: Final = 1 << 62
_CUTS: Final = frozenset({"select", "slice", "unbind", "split", "split_with_sizes"})
# By the argument that names the places, along ``dim`` or, as a list of indices, along the axes in order.
_NAMES: Final = frozenset(
    {
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index_put",
        "index_fill",
        "index_fill_",
        "index_copy",
        "index_copy_",
    }
)
# They put rows side by side, and make none of another.
_JOINS: Final = frozenset({"cat", "stack", "concat", "_pack_padded_sequence", "nested_tensor"})


@dataclass(slots=True)
class _Written:
    """Which entries of a tensor with as many along its axis of rows a line of code has written to; ``storage`` keeps its number."""

    storage: Any
    entries: int
    places: set[int] = field(default_factory=set)


class PartsOfRows:
    """Follows views of some of the rows.

    Args:
        rows: the prime number of rows.
        whole_rows: how many the call has.
        line: tells the line of own code that is running; None where a library's is.
    """

    def __init__(self, rows: int, whole_rows: int, line: Callable[[], tuple[str, int] | None]) -> None:
        self._rows, self._whole_rows, self._line = rows, whole_rows, line
        self._written: dict[tuple[int, tuple[str, int]], _Written] = {}
        self._named: list[Origin] = []

    def note(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """Note what an operation takes of the rows, or writes to it.

        Args:
            func: the operation.
            args: its arguments.
            kwargs: its arguments by name.
            inputs: the tensors among them.
            outs: those that it makes.
        """
        name = name_of(func)
        if name in _CUTS:
            given = arguments_of(func, args, kwargs)
            if inputs[0].dim() and self._is_rows(inputs[0].shape[given["dim"]]):
                self._cut(name, given, inputs[0], outs)
                return
        if name not in _JOINS:
            self._carry(name, inputs, outs)
        if name in _NAMES and self._names_places(arguments_of(func, args, kwargs), inputs[0]):
            self._name()
        if inputs and (part := getattr(inputs[0], "_oomguard_part", None)) is not None:
            storage = inputs[0].untyped_storage()._cdata
            for leaf in outs:
                if leaf.untyped_storage()._cdata == storage:
                    leaf._oomguard_part = part
        if func._schema.is_mutable:
            for target in written(func, args, kwargs):
                self._write(target)

    def is_several(self, leaf: torch.Tensor) -> bool:
        """Return whether own code has just cut a tensor of several rows, and not of all."""
        part = getattr(leaf, "_oomguard_part", None)
        return part is not None and len(part[1]) > 1 and self._line() is not None

    def named(self) -> Iterator[Origin]:
        """Yield the lines that name rows by number."""
        yield from self._named
        for (_, line), found in self._written.items():
            if len(found.places) < found.entries:
                yield Origin(PLACE, *line)

    def _cut(self, name: str, given: Mapping[str, Any], first: torch.Tensor, outs: Sequence[Any]) -> None:
        size = int(first.shape[given["dim"]])
        if name == "slice":
            bounds = given.get("start"), given.get("end"), given.get("step") or 1
            if self._reaches_beyond(bounds[:2], size):
                self._name()
            cuts = [range(size)[slice(*bounds)]]
        elif name == "select":
            index = int(given["index"]) % size
            cuts = [range(index, index + 1)]
        else:
            entries = [1 if name == "unbind" else int(leaf.shape[given["dim"]]) for leaf in outs]
            cuts = [range(end - many, end) for end, many in zip(accumulate(entries), entries, strict=True)]
        for leaf, places in zip(outs, cuts, strict=False):
            if not self._is_rows(len(places)):
                leaf._oomguard_part = size, places
                leaf._oomguard_taken = frozenset(place // (size // self._rows) for place in places)

    def _carry(self, name: str, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Note which rows an operation computes with, where it was given some alone, and that it makes one of another."""
        taken = {rows for leaf in inputs if (rows := getattr(leaf, "_oomguard_taken", None)) is not None}
        if len(taken) > 1 and (line := self._line()) is not None:
            self._named.append(Origin(name, *line))
        for leaf in outs if taken else ():
            leaf._oomguard_taken = frozenset().union(*taken)

    def _reaches_beyond(self, bounds: Sequence[Any], size: int) -> bool:
        """Return whether a bound is beyond the rows that are followed, and within those of the call."""
        whole = size // self._rows * self._whole_rows
        return any(isinstance(bound, int) and size < abs(bound) < min(whole, _TO_THE_END) for bound in bounds)

    def _names_places(self, given: Mapping[str, Any], first: torch.Tensor) -> bool:
        """Return whether an operation writes along rows at places that no row tells."""
        indices = given.get("indices")
        pairs = enumerate(indices) if indices is not None else [(given.get("dim", 0), given.get("index"))]
        return any(
            isinstance(index, torch.Tensor)
            and index.dtype not in (torch.bool, torch.uint8)
            and self._is_rows(first.shape[axis])
            and not any(map(self._is_rows, index.shape))
            and getattr(index, "_oomguard_of", None) is None
            for axis, index in pairs
        )

    def _write(self, target: torch.Tensor) -> None:
        part = getattr(target, "_oomguard_part", None)
        line = None if part is None else self._line()
        if part is None or line is None:
            return
        storage, (size, places) = target.untyped_storage(), part
        found = self._written.setdefault((storage._cdata, line), _Written(storage, size))
        found.places.update(places)

    def _name(self) -> None:
        if (line := self._line()) is not None:
            self._named.append(Origin(PLACE, *line))

    def _is_rows(self, size: int) -> bool:
        return bool(size) and size % self._rows == 0
