"""Operations whose results hold rows and compute each of them from others, told by their
dimensions.

As fake_generate.py this imports torch.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

_DATA: Final = Path(__file__).with_name("rows_together.toml")


@functools.cache
def _operations(group: str) -> frozenset[str]:
    return frozenset(tomllib.loads(_DATA.read_text())[group]["operations"])


@functools.cache
def _tables() -> dict[str, str]:
    return dict(tomllib.loads(_DATA.read_text())["looks_through"])


def mixes_along(
    name: str, given: Mapping[str, Any], first: torch.Tensor, is_rows: Callable[[int], bool]
) -> bool:
    """Return whether an operation goes along a dimension that holds rows, and takes its entries
    together.

    Args:
        name: its name.
        given: its arguments by name.
        first: the first of them that holds rows.
        is_rows: whether a size is of rows.
    """
    if name in _operations("along"):
        is_count = name in _operations("places") and not first.dtype.is_floating_point
        return not is_count and goes_along(given, first, is_rows)
    if name in _tables():
        held = given.get(_tables()[name])
        whole = name == "isin"  # others have a table of their own in front of the last axis
        return isinstance(held, torch.Tensor) and any(
            map(is_rows, held.shape if whole else held.shape[-1:])
        )
    if "scaled_dot_product" in name:
        return False  # tokens of all rows in one line have bounds or a mask
    return _takes_together(name, given, first, is_rows)


def _takes_together(
    name: str, given: Mapping[str, Any], first: torch.Tensor, is_rows: Callable[[int], bool]
) -> bool:
    """Return whether a layer takes the entries of a dimension together that holds rows."""
    if name == "renorm":  # by the norm of each entry along one dimension
        return not is_rows(first.shape[given["dim"]])
    if name in _operations(
        "steps"
    ):  # oneDNN's has its input turned round before, whatever ``batch_first`` says
        return is_rows(first.shape[1 if given.get("batch_first") and "mkldnn" not in name else 0])
    if name in _operations("normalizes_last"):
        last = len(given.get("normalized_shape") or ())
        return bool(last) and any(map(is_rows, first.shape[-last:]))
    if name == "native_group_norm":
        return not is_rows(int(given.get("N") or 0))
    if name in _operations("slides"):
        return first is given.get("input", given.get("self")) and any(
            map(is_rows, first.shape[_space(given, first) :])
        )
    return False


def goes_along(
    given: Mapping[str, Any], first: torch.Tensor, is_rows: Callable[[int], bool]
) -> bool:
    """Return whether the dimensions that an operation names hold rows."""
    return any(is_rows(first.shape[dim]) for dim in _dims(given, first))


def _dims(given: Mapping[str, Any], first: torch.Tensor) -> Sequence[int]:
    for name in ("dim", "dims"):
        value = given.get(name)
        if isinstance(value, int):
            if first.dim():
                return (value,)
            return ()
        if isinstance(value, (list, tuple)):
            return value or range(first.dim())
    return ()


def _space(given: Mapping[str, Any], first: torch.Tensor) -> int:
    """Return the first of the dimensions that a window slides over."""
    window = next(
        (given[name] for name in ("stride", "kernel_size", "output_size") if given.get(name)), (1,)
    )
    return int(first.dim()) - (len(window) if isinstance(window, (list, tuple)) else 1)


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by name, those that it was not given as well."""
    found: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            found[argument.name] = args[number]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def found_places(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Return what an operation whose result is as long as it finds entries would give if it found
    all; None of any other.

    An expert's tokens are found so, or those that are no padding: how many there are is told by
    values alone, and that they are rows is told by the most there may be.
    """
    name = str(func._schema.name)
    if name == "aten::nonzero":
        return _all_places(args[0])
    if name == "aten::masked_select":
        return args[0].new_empty((torch.broadcast_shapes(args[0].shape, args[1].shape).numel(),))
    if name == "aten::index" and any(_is_mask(index) for index in given["indices"]):
        indices: list[Any] = []
        for index in given["indices"]:
            indices += _all_places(index).unbind(1) if _is_mask(index) else [index]
        return func(args[0], indices)
    return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.long)


class Places:
    """Follows running numbers of rows, and how far one goes that is held against a limit: how many
    rows stand before each decides then.

    Where tokens go is told by such numbers, and changes none of them; how many there is room for
    does.
    """

    def is_limited(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        *,
        begins: bool,
    ) -> bool:
        """Note what an operation makes of places; return whether it holds them against a limit.

        Args:
            name: its name.
            inputs: the tensors that it is given.
            outs: those that it makes.
            begins: whether it numbers rows.
        """
        is_place = begins or any(getattr(leaf, "_oomguard_place", False) for leaf in inputs)
        if not is_place:
            return False
        if name in _operations("limits"):
            return True
        for leaf in outs:
            leaf._oomguard_place = not leaf.dtype.is_floating_point and leaf.dtype != torch.bool
        return False
