"""What to write where nothing tells whose an argument is: a function of the user's own, who knows what has one entry a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oomguard.engines.reason import Reason
from oomguard.engines.transformers.followed import Followed
from oomguard.engines.transformers.own_code import own_code


def with_own_function(
    why: str, model: Any, arguments: Mapping[str, Any], rows: int | None = None, steps: int | None = None
) -> Reason:
    """Return why a call is not run in parts, with the function to write instead; its arguments are those with one entry a row.

    Where a row depends on those beside it that is told in its place: the function would change answers. The line to write is named only
    where the model's code, a library's, was followed with these arguments cut at the rows, and none of them needs another.

    Args:
        why: the reason.
        model: the model that is called.
        arguments: the arguments of the call by name.
        rows: how many rows it has; None where that is not known: as many as the most that an argument has entries.
        steps: tokens that it generates; None for a plain call.
    """
    given = dict(arguments)

    def with_advice(reason: str) -> str:
        number = rows or max((_entries(value) or 0 for value in given.values()), default=0)
        names = [name for name, value in given.items() if _entries(value) == number]
        together, is_told = _why_together(model, given, names, number, steps)
        if together is not None:
            return f"{reason}; and {together}"
        if any(_holds_rows(value, number) for name, value in given.items() if name not in names):
            first = "make them all in one function of your own that takes what the first of them is given"
            return f"{reason}. Where that comes from an earlier call, {first}, under @oomguard.guard(batch=...)"
        if not is_told or not names:
            return f"{reason}. Whether its rows can be run apart is yours to know: @oomguard.guard(batch=...) on a function says it"
        return f"{reason}. Where you know what has one entry a row, make the batch and the call in a function that takes it: {_line(names)}"

    return Reason.of(why, with_advice)


def _line(names: Sequence[str]) -> str:
    """Return the line to write above a function of these arguments."""
    batch = ", ".join(f'"{name}"' for name in names)
    several = f"({batch})" if len(names) > 1 else batch or "NAME"
    return f"@oomguard.guard(batch={several}) above def f({', '.join(names) or 'NAME'})"


def _entries(value: Any) -> int | None:
    """Return how many entries a tensor has, or a list of tensors."""
    if hasattr(value, "untyped_storage"):
        return int(value.shape[0]) if value.dim() else None
    is_list = isinstance(value, (list, tuple)) and value and all(hasattr(entry, "untyped_storage") for entry in value)
    return len(value) if is_list else None


def _holds_rows(value: Any, rows: int) -> bool:
    """Return whether a value holds tensors of all rows inside: the state of a model, layer by layer."""
    entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(_entries(entry) == rows for entry in entries)


def _why_together(
    model: Any, given: Mapping[str, Any], names: Sequence[str], rows: int, steps: int | None
) -> tuple[str | None, bool]:
    """Return what makes a row depend on others where these arguments hold rows, and whether that can be told."""
    lists = {name: given[name] for name in names if isinstance(given[name], (list, tuple))}
    if any(len({tuple(entry.shape) for entry in value}) > 1 for value in lists.values()) or rows <= 1:
        return None, False
    of_rows = {
        name: _as_one(given[name]) for name in names
    }  # now: under fake tensors there is no view of one that is not
    followed = Followed(
        model,
        lambda change: {name: change(of_rows[name]) if name in names else value for name, value in given.items()},
        rows,
        given.get("attention_mask"),
        steps=steps,
        lists=lists,
    )
    together = followed.why_together()
    return together, followed.is_told_for_all_values() and own_code(model) is None


def _as_one(value: Any) -> Any:
    """Return a tensor of the shape that a list of tensors has together, which takes no memory."""
    return value[0].unsqueeze(0).expand(len(value), *value[0].shape) if isinstance(value, (list, tuple)) else value
