"""Count, cut and check values with one entry per row.

A kind of value with its own way to cut or join is a row in ``_FRAMES``, or a function next to
``entries`` and ``cut``.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import UserDict
from collections.abc import Mapping, Set
from typing import Any, Final

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
    if hasattr(value, "iloc"):
        return value.iloc[start:stop]
    return value[start:stop]


def with_columns(value: Any, columns: dict[Any, Any]) -> Any:
    """Return a new mapping of the same type with these columns; None if the type cannot."""
    if isinstance(value, (dict, UserDict)):  # their copies share no column
        part = copy.copy(value)
        part.update(columns)
        return part
    with contextlib.suppress(Exception):
        made = type(value)(columns)
        if list(made) == list(columns) and all(
            made[key] is column for key, column in columns.items()
        ):
            return made
    return None


def lists_beside(value: Any) -> dict[str, list[Any]]:
    """Return an object's attributes that are lists with one entry per row (BatchEncoding)."""
    if not isinstance(value, UserDict):
        return {}
    rows = rows_of(value)
    return {
        name: beside
        for name, beside in vars(value).items()
        if isinstance(beside, list) and len(beside) == rows
    }


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
    return bool(fields) and all(_is_field(field) and entries(field) == rows for field in fields)


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
    if isinstance(result, tuple) and all(
        _is_field(entry) and entries(entry) == rows for entry in result
    ):
        return (
            f"its result is a tuple of {size} values with {rows} entries each, which may be fields "
            "or rows"
        )
    if size != rows:
        return f"its result has {size} entries for {rows} rows"
    return None


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
        return type(result) in (
            numpy.ndarray,
            numpy.ma.MaskedArray,
        )  # another type may have state besides its values
    return hasattr(result, "__array_namespace__")
