"""Numbers that come from a row's place in the batch, and not from what the row holds: ``arange``
over the rows, a table cut to them.

Where such a number meets what a row holds, the row gives something else at another place. As an
index of rows (``x[arange(rows), lengths]``, the offsets of beams) it picks the row that is there,
and changes nothing. As fake_generate.py this imports torch.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from support.row_tracer.known_values import KnownValues, written
from support.row_tracer.rows_mixed import arguments_of

_DATA: Final = Path(__file__).with_name("rows_together.toml")
# What a tensor is made of a row's place: a number, or which rows there are (the places where a mask
# of rows is true).
_NUMBER: Final = 1
_CHOICE: Final = 2


@functools.cache
def _operations(group: str) -> frozenset[str]:
    return frozenset(tomllib.loads(_DATA.read_text())[group]["operations"])


class PlacedRows:
    """Follows numbers that come from a row's place.

    Args:
        rows: the prime number of rows.
        values: what the tensors of the trace hold, where that is known.
    """

    def __init__(self, rows: int, values: KnownValues) -> None:
        self._rows = rows
        self._values = values
        self._written: dict[int, tuple[Any, int]] = {}

    def decides(self, tensor: torch.Tensor, *, of_rows: bool) -> bool:
        """Return whether the place of its row tells what an entry of a tensor is.

        Args:
            tensor: the tensor.
            of_rows: whether it depends on what rows hold.
        """
        if not any(map(self._is_rows, tensor.shape)):
            return False
        if self._noted(tensor):
            return True
        return not of_rows and self._differs_by_row(tensor)

    def among(
        self, inputs: Sequence[torch.Tensor], of_rows: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return those of an operation's inputs that a row's place tells, before it writes to one
        of them.

        Args:
            inputs: the tensors that it is given.
            of_rows: those of them that depend on what rows hold.
        """
        known = {id(leaf) for leaf in of_rows}
        return [leaf for leaf in inputs if self.decides(leaf, of_rows=id(leaf) in known)]

    def note(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        of_rows: Sequence[torch.Tensor],
        placed: Sequence[torch.Tensor],
    ) -> bool:
        """Note what an operation makes of such numbers; return whether they meet in it what rows
        hold.

        Args:
            func: the operation.
            name: its name.
            args: its arguments.
            kwargs: its arguments by name.
            inputs: the tensors that it is given.
            outs: those that it makes.
            of_rows: the inputs that depend on what rows hold.
            placed: those that a row's place tells.
        """
        held = [leaf for leaf in outs if any(map(self._is_rows, leaf.shape))]
        if not held or name in _operations("makes_anew"):
            return False
        if placed:
            picks = set(map(id, self._picking(name, arguments_of(func, args, kwargs))))
            placed = [leaf for leaf in placed if id(leaf) not in picks]
        if (
            of_rows
            and placed
            and any(leaf.is_floating_point() or leaf.is_complex() for leaf in held)
        ):
            return True
        mark = max(map(self._mark_of, placed), default=0)
        if not of_rows and not placed and self._begins(func, name, inputs):
            if all(map(self._is_known, held)):
                mark = 0
            else:
                mark = _NUMBER
        elif (
            not of_rows
            and mark == _NUMBER
            and all(map(self._is_known, held))
            and name not in _operations("limits")
        ):
            mark = max(
                map(self._noted, placed), default=0
            )  # its values tell, but for what was held against a limit
        if placed and name in _operations("finds"):
            mark = _CHOICE
        if mark:
            self._mark(func, args, kwargs, held, mark)
        return False

    def _begins(self, func: Any, name: str, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether an operation makes rows of what has none, each of another number."""
        if torch.Tag.nondeterministic_seeded in func.tags or name in _operations("repeats"):
            return False
        return not any(any(map(self._is_rows, leaf.shape)) for leaf in inputs)

    def _picking(self, name: str, given: Mapping[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the indices of an operation that go along rows, and give each entry what stands in
        its own row.
        """
        if name in _operations("indexes_places"):
            first = given["self"]
            for axis, index in enumerate(given["indices"]):
                if index is not None and index.dtype not in (torch.bool, torch.uint8):
                    yield from self._along(first, axis, index)
        elif name in _operations("indexes_axis"):
            yield from self._along(given["self"], given["dim"], given["index"])
        elif name == "embedding":
            yield from self._along(given["weight"], 0, given["indices"])
        elif name in ("take", "put", "put_"):
            first = given["self"]
            if any(map(self._is_rows, first.shape)):
                yield given["index"]

    def _along(self, first: torch.Tensor, axis: int, index: torch.Tensor) -> Iterator[torch.Tensor]:
        is_along = first.dim() > 0 and self._is_rows(first.shape[axis])
        if (
            is_along
            and self._noted(index) != _CHOICE
            and self._is_own_row(first.shape[axis], index)
        ):
            yield index

    def _is_own_row(self, size: int, index: torch.Tensor) -> bool:
        """Return whether an index of one number a row, where it is known, names each row at its
        place.
        """
        places = [axis for axis, entries in enumerate(index.shape) if entries == self._rows]
        if (
            size != self._rows
            or len(places) != 1
            or getattr(index, "_oomguard_of", None) is not None
        ):
            return True
        known = self._values.of(index)
        if known is None or not self._differs_by_row(index):
            return True
        with _disable_current_modes():
            rows = known.whole.movedim(places[0], 0).reshape(self._rows, -1)
            return bool((rows == torch.arange(self._rows)[:, None]).all())

    def _differs_by_row(self, tensor: torch.Tensor) -> bool:
        known = self._values.of(tensor)
        if known is None:
            return False
        if not isinstance(tensor, FakeTensor):
            return self._is_other(known.whole)
        version = known.whole._version
        told = getattr(tensor, "_oomguard_differs", None)
        if told is not None and told[0] is known.whole and told[1] == version:
            return bool(told[2])
        found = self._is_other(known.whole)
        tensor._oomguard_differs = known.whole, version, found
        return found

    def _is_other(self, value: torch.Tensor) -> bool:
        with _disable_current_modes():
            axes = [axis for axis, size in enumerate(value.shape) if self._is_rows(size)]
            return any(self._is_other_along(value, axis) for axis in axes)

    def _is_other_along(self, value: torch.Tensor, axis: int) -> bool:
        """Return whether the rows along an axis differ, whichever of both ways several entries of a
        row stand there.
        """
        along = value.movedim(axis, 0)
        together = along.reshape(self._rows, -1)
        apart = (
            along.reshape(-1, self._rows, *along.shape[1:]).transpose(0, 1).reshape(self._rows, -1)
        )
        return not (_are_alike(together) or _are_alike(apart))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return self._values.of(tensor) is not None

    def _mark_of(self, tensor: torch.Tensor) -> int:
        return self._noted(tensor) or _NUMBER

    def _noted(self, tensor: torch.Tensor) -> int:
        found = int(getattr(tensor, "_oomguard_placed", 0))
        if not found and self._written:
            found = self._written.get(tensor.untyped_storage()._cdata, (None, 0))[1]
        return found

    def _mark(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outs: Sequence[torch.Tensor],
        mark: int,
    ) -> None:
        for leaf in outs:
            leaf._oomguard_placed = mark
        if func._schema.is_mutable:
            for target in written(func, args, kwargs):
                storage = target.untyped_storage()
                self._written[storage._cdata] = storage, mark

    def _is_rows(self, size: int) -> bool:
        return bool(size) and size % self._rows == 0


def _are_alike(rows: torch.Tensor) -> bool:
    first = rows[:1]
    # no number equals itself not
    return bool(((rows == first) | ((rows != rows) & (first != first))).all())  # noqa: PLR0124
