"""Memory that kernels take beside the tensors of an operation: asked of torch's allocator when it begins, given back when it ends.

The formulas stand in scratch.toml, by torch's names of operations. As fake_generate.py this imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("scratch.toml")
_RESULT: Final = "result"


@dataclass(frozen=True, slots=True)
class Block:
    """One block: the sum of products of numbers, each (factor, names of numbers).

    ``least`` and ``below`` are limits of numbers, by name, between which the block is taken. One that is taken ``before`` is there
    when the result is made; the operation goes on without one that ``may_fail``.
    """

    terms: tuple[tuple[float, tuple[str, ...]], ...]
    least: Mapping[str, float]
    below: Mapping[str, float]
    before: bool
    may_fail: bool

    def bytes(self, numbers: Mapping[str, float]) -> int:
        """Return its bytes; 0 where it is not taken."""
        if any(numbers[name] < limit for name, limit in self.least.items()):
            return 0
        if any(numbers[name] >= limit for name, limit in self.below.items()):
            return 0
        return math.ceil(sum(times * math.prod(numbers[name] for name in names) for times, names in self.terms))


class KernelScratch:
    """The blocks that the operations of one kind of device take, e.g. ``cuda``."""

    def __init__(self, device_type: str | None) -> None:
        self._blocks = _operations().get(device_type or "", {})

    def blocks_bytes(
        self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[list[int], list[int]] | None:
        """Return the bytes of the blocks that an operation takes beside its tensors: before its result, and after; None without any.

        Each operation takes the same number of blocks whatever its sizes, so that calls of other rows are told on a line: one
        that is not taken is of one byte. Those without which the operation goes on are negative.
        """
        blocks = self._blocks.get(operation._schema.name)
        if blocks is None:
            return None
        numbers = _numbers(operation, args, kwargs, result)
        found: tuple[list[int], list[int]] = ([], [])
        for block in blocks:
            found[not block.before].append(max(1, block.bytes(numbers)) * (-1 if block.may_fail else 1))
        return found


def _numbers(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> dict[str, float]:
    """Return the numbers that formulas may name: ``self.bytes`` of a tensor, ``k`` of a plain number; arguments by torch's names."""
    arguments = operation._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given.update({one.name: value for one, value in zip(arguments, args, strict=False)}, **kwargs)
    numbers: dict[str, float] = {}
    for name, value in (*given.items(), (_RESULT, next(iter(tree_leaves(result)), None))):
        if isinstance(value, (list, tuple)):
            numbers[f"{name}.tensors"] = sum(isinstance(entry, torch.Tensor) for entry in value)
        elif isinstance(value, torch.Tensor):
            width = value.shape[-1] if value.dim() else 1
            numbers |= {
                f"{name}.bytes": value.numel() * value.element_size(),
                f"{name}.elements": value.numel(),
                f"{name}.width": width,
                f"{name}.rows": value.numel() // max(1, width),
                f"{name}.channels": value.shape[1] if value.dim() > 1 else 1,
                f"{name}.element_bytes": value.element_size(),
                f"{name}.copied_bytes": 0 if _is_in_order(value) else value.numel() * value.element_size(),
            }
        elif isinstance(value, (bool, int, float)):
            numbers[name] = value
    return numbers


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Return whether a kernel takes a tensor as it lies: no copy is made of it first."""
    is_image = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return bool(is_image or tensor.is_contiguous())


@cache
def _operations() -> dict[str, dict[str, tuple[Block, ...]]]:
    """Return the blocks of every operation, by kind of device."""
    found: dict[str, dict[str, tuple[Block, ...]]] = {}
    for row in read_tables("scratch", [_FILE])[_FILE]["operation"]:
        blocks = tuple(_block(block) for block in row["blocks"])
        found.setdefault(row["device"], {}).update(dict.fromkeys(row["names"], blocks))
    return found


def _block(row: Mapping[str, Any]) -> Block:
    terms = tuple((times, tuple(names)) for times, *names in row["sum"])
    limits = row.get("least", {}), row.get("below", {})
    return Block(terms, *limits, row.get("before", False), row.get("may_fail", False))
