"""What to do where nothing tells whose an argument is: a function of the user's own, who knows what has one entry a row.

Which arguments these are is not said: a line to paste that names a wrong one changes answers without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomguard.engines.reason import Reason
from oomguard.engines.transformers.followed import Followed
from oomguard.engines.transformers.own_code import OWN_FUNCTION

_STATE: Final = "make them all in one function of your own that takes what the first of them is given, under @oomguard.guard(batch=...)"


def with_own_function(
    why: str, model: Any, arguments: Mapping[str, Any], rows: int | None = None, steps: int | None = None
) -> Reason:
    """Return why a call is not run in parts, with what to do about it.

    Where a row depends on those beside it that is told in its place: the function would change answers.

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
        if (together := _why_together(model, given, names, number, steps)) is not None:
            return f"{reason}; and {together}"
        if any(_holds_rows(value, number) for name, value in given.items() if name not in names):
            return f"{reason}. Where that comes from an earlier call, {_STATE}"
        return f"{reason}. {OWN_FUNCTION}"

    return Reason.of(why, with_advice)


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
) -> str | None:
    """Return what makes a row depend on others where these arguments hold rows."""
    lists = {name: given[name] for name in names if isinstance(given[name], (list, tuple))}
    if any(len({tuple(entry.shape) for entry in value}) > 1 for value in lists.values()):
        return None
    # Made now: under fake tensors there is no view of one that is not.
    of_rows = {name: _as_one(given[name]) for name in names}
    return Followed(
        model,
        lambda change: {name: change(of_rows[name]) if name in names else value for name, value in given.items()},
        rows,
        given.get("attention_mask"),
        steps=steps,
        lists=lists,
    ).why_together()


def _as_one(value: Any) -> Any:
    """Return a tensor of the shape that a list of tensors has together, which takes no memory."""
    return value[0].unsqueeze(0).expand(len(value), *value[0].shape) if isinstance(value, (list, tuple)) else value
