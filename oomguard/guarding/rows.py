"""What holds one entry a row: how many there are, some of them cut out, and whether a result has one for each row.

A kind of value that is cut or joined in its own way is a row in ``_FRAMES``, or a function beside ``entries`` and ``cut``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any, Final

# Libraries whose tables hold a row an entry, though a slice of them may mean labels; each has ``concat``.
_FRAMES: Final = frozenset({"pandas", "polars", "cudf", "modin"})
# One thing, however many entries they have.
_WHOLE: Final = (str, bytes, bytearray, Mapping, Set)


def library(value: Any) -> str:
    """Return the library that a value's type comes from."""
    return type(value).__module__.partition(".")[0]


def is_frame(value: Any) -> bool:
    """Return whether a value is a table or a column of one."""
    return library(value) in _FRAMES and hasattr(value, "shape")


def entries(value: Any) -> int | None:
    """Return how many rows a value may hold; None for one thing: a text, a number, a mapping, a model."""
    if isinstance(value, _WHOLE) or hasattr(value, "parameters"):
        return None
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if hasattr(value, "__len__") and hasattr(value, "__getitem__") else None


def can_be_cut(value: Any) -> bool:
    """Return whether ``cut`` gives entries of a value in their order, as a value of the same type."""
    return isinstance(value, (list, tuple, range)) or (hasattr(value, "shape") and len(value.shape) > 0)


def cut(value: Any, start: int, stop: int) -> Any:
    """Return entries ``start`` to ``stop`` by their place, never by a label."""
    return value.iloc[start:stop] if hasattr(value, "iloc") else value[start:stop]


def why_not_rows(result: Any, rows: int) -> str | None:
    """Return why a result is not one entry for each row; None where it is."""
    if not isinstance(result, (list, tuple)) and not can_be_joined(result):
        return f"its result is a {type(result).__name__}: a list, tuple, tensor, array or table with one entry a row is needed"
    size = entries(result)
    if size != rows:
        return f"its result has {size} entries for {rows} rows"
    if isinstance(result, tuple) and all(entries(entry) == rows for entry in result):
        return f"its result is a tuple of {size} that hold {rows} entries each: whether it is one entry a row cannot be told"
    return None


def can_be_joined(result: Any) -> bool:
    """Return whether results like this one can be put together to one of the same type."""
    shape = getattr(result, "shape", None)
    if shape is None or len(shape) == 0:
        return False
    if hasattr(result, "untyped_storage") or is_frame(result):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(result, numpy.ndarray):
        return type(result) in (
            numpy.ndarray,
            numpy.ma.MaskedArray,
        )  # what another type holds beside its values is not known
    return hasattr(result, "__array_namespace__")
