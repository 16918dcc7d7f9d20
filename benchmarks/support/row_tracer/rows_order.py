"""Whether the entries of one row stand beside each other in a tensor, in the order of the rows; as
fake_generate.py this imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class RowOrder:
    """Marks tensors in which they do not.

    Args:
        rows: the prime number of rows.
        looks_otherwise: operations that give the same entries in the same order, along other axes.
    """

    def __init__(self, rows: int, looks_otherwise: Sequence[str]) -> None:
        self._rows = rows
        self._looks_otherwise = frozenset(looks_otherwise)

    def note(self, name: str, inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Mark results of whose entries those of one row may not stand beside each other, in the
        order of the rows.
        """
        before = [leaf for leaf in inputs if self._count(leaf)]
        if not before:
            return  # what is made of no row is the same for each
        entries = max(self._entries(leaf) for leaf in before)
        for leaf in outs:
            if self._count(leaf) != 1:
                continue
            if len(before) == 1 and name in self._looks_otherwise:
                start = self._before(leaf)
                old = self._before(before[0])
                is_other = start < old or (start == old and _is_of_other_order(before[0]))
            else:
                is_other = self._entries(leaf) > entries or any(map(_is_of_other_order, before))
            leaf._oomguard_of_other_order = is_other

    def _entries(self, tensor: torch.Tensor) -> int:
        return max((size // self._rows for size in tensor.shape if self._is_rows(size)), default=1)

    def _before(self, tensor: torch.Tensor) -> int:
        """Return how many entries lie along the axes before the rows."""
        return math.prod(
            tensor.shape[
                : next(axis for axis, size in enumerate(tensor.shape) if self._is_rows(size))
            ]
        )

    def _is_rows(self, size: int) -> bool:
        return bool(size) and size % self._rows == 0

    def _count(self, tensor: torch.Tensor) -> int:
        return sum(self._is_rows(size) for size in tensor.shape)


def _is_of_other_order(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_oomguard_of_other_order", False))
