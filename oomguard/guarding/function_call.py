"""A plain function that works on rows: called on a part of one named argument, its results put together in order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowsCall:
    """One call of a function whose argument ``name`` holds one entry per row (list, tuple, tensor or array)."""

    bound: inspect.BoundArguments
    name: str
    rows: int
    not_splittable: str | None
    model: Any = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    result_row_bytes: int = 0

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RowsCall:
        """Read a call; raises TypeError where the arguments do not fit the function, as calling it would."""
        bound = inspect.signature(function).bind(*args, **kwargs)
        value: Any = bound.arguments.get(name)
        if isinstance(value, (list, tuple)) or (hasattr(value, "shape") and len(value.shape) > 0):
            return cls(bound, name, len(value), None)
        return cls(bound, name, 1, f"the argument {name} is no list and no tensor")

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of the whole call."""
        return self.bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of the whole call."""
        return self.bound.kwargs

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call on rows ``start`` to ``stop``."""
        arguments = dict(self.bound.arguments)
        arguments[self.name] = arguments[self.name][start:stop]
        part = inspect.BoundArguments(self.bound.signature, arguments)
        return part.args, part.kwargs

    def problem(self, part: Any, rows: int) -> str | None:
        """Return why the result of a part cannot be put together with others; None where it has one entry for each row."""
        if isinstance(part, (list, tuple)):
            size = len(part)
        elif hasattr(part, "shape") and len(part.shape) > 0:
            size = part.shape[0]
        else:
            return f"its result is a {type(part).__name__}: a list, tuple, tensor or array with one entry per row is needed"
        return None if size == rows else f"its result has {size} entries for {rows} rows"

    def merge(self, parts: Sequence[Any]) -> Any:
        """Return the results of all parts as one, in order; each has passed ``problem``."""
        if isinstance(parts[0], (list, tuple)):
            rows = [row for part in parts for row in part]
            return rows if isinstance(parts[0], list) else tuple(rows)
        if hasattr(parts[0], "untyped_storage"):
            import torch

            return torch.cat(parts)
        import numpy as np

        return np.concatenate(parts)

    def traced(self) -> None:
        """Return None: nobody knows what the function does."""
        return
