"""What ``fn`` returned, as one result an item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oomguard.errors import UsageError


def one_each(results: Any, items: int) -> Sequence[Any]:
    """Return what ``fn`` gave as a list with one result for each item.

    Raises:
        UsageError: it is none.
    """
    kind = type(results).__name__
    try:
        count = None if _is_no_list(results) else len(results)
    except (TypeError, RuntimeError):  # a tensor or an array of no dimension, or a nested one
        count = None
    if count is None:
        hint = "fn takes a list of items and returns a list of as many results"
        if hasattr(results, "iloc"):
            hint += ': table.to_dict("records"), series.tolist()'
        elif isinstance(results, Mapping):
            hint += ": [{name: column[place] for name, column in results.items()} for place in range(len(items))]"
        raise UsageError(f"fn returned a {kind}", hint=hint)
    if count != items:
        hint = "fn takes a list of items and returns one result for each, in the same order"
        raise UsageError(f"fn returned a {kind} of {count} results for {items} items", hint=hint)
    return results if type(results) is list else [results[place] for place in range(items)]


def _is_no_list(results: Any) -> bool:
    """Return whether ``results[place]`` is not the result at a place: a mapping's is that of a key, a table's that of a label."""
    if isinstance(results, (str, bytes, Mapping)) or hasattr(results, "iloc"):
        return True
    return not (hasattr(results, "__getitem__") and hasattr(results, "__len__"))
