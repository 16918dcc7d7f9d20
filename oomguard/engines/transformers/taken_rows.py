"""Arguments that nobody has listed, taken for rows where all that a call is given has as many entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from oomguard.engines.transformers.forward_rows import is_known, names
from oomguard.engines.transformers.tensors import is_tensor, tensors


def common_rows(arguments: Mapping[str, Any]) -> int | None:
    """Return how many entries every tensor of a call has that has no known input; None where they differ, or are fewer than two.

    One of them is a tensor of several axes by itself: of a list alone, its entries may be the rows.
    """
    given = {name: value for name, value in arguments.items() if name not in names("whole")}
    found = {_entries(tensor) for value in given.values() for tensor in tensors(value)}
    has_input = any(is_tensor(value) and value.ndim > 1 for value in given.values())
    rows = found.pop() if len(found) == 1 and has_input else None
    return rows if rows is not None and rows > 1 else None


def taken_for_rows(arguments: Mapping[str, Any], rows: int, beside: Collection[str] = ()) -> frozenset[str]:
    """Return the arguments that are taken for one entry a row: no other is listed under their names, and ``beside`` the text."""
    return frozenset(
        name for name, value in arguments.items() if (name in beside or not is_known(name)) and _has_rows(value, rows)
    )


def _has_rows(value: Any, rows: int) -> bool:
    is_list = type(value) in (list, tuple) and len(value) != rows and all(map(is_tensor, value))
    is_plain = is_tensor(value) or is_list  # a list of as many may have a tensor for each row
    return is_plain and {_entries(tensor) for tensor in tensors(value)} == {rows}


def _entries(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 0
