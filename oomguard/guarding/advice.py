"""Add the diagnosis and advice to an exception that leaves a guard."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Attempt, Diagnosis
from oomguard.diagnosis import assess_all, default_rules
from oomguard.engines.registry import insight_of, launchers
from oomguard.guarding.failure import (
    add_note,
    annotate,
    frames_of,
    locals_of,
    module_of,
    scan_error,
)
from oomguard.guarding.rows import rows_of, why_not_cut
from oomguard.remedy.policy import Policy

# An engine may refuse a request because the guard reduced its limits; the note says so.


def explain_refusal(error: BaseException, attempts: Sequence[Attempt]) -> bool:
    """Add the guard's changes to an exception about a refused request; return whether it is one."""
    note = refusal_note(error, attempts)
    if note is not None:
        error.add_note(note)
    return note is not None


def refusal_note(error: BaseException, attempts: Sequence[Attempt]) -> str | None:
    """Return the note for a refused request; None if no change of the guard caused it.

    Args:
        error: the exception that left the guard.
        attempts: the guard's attempts. The first patch of a setting has the program's value, and
            the last one the effective value.
    """
    patches = [patch for attempt in attempts for patch in attempt.patches if patch.new is not None]
    own: dict[str, FactValue | None] = {patch.setting: patch.old for patch in reversed(patches)}
    in_force = {patch.setting: patch.new for patch in patches if patch.new is not None}
    for engine in launchers():
        for name, need in insight_of(engine).refused_length(str(error), in_force).items():
            before = own[name]
            if (
                isinstance(before, (int, float))
                and math.isfinite(need.value)
                and need.value > before
            ):
                return None  # the program's own value would not have been enough either
            if math.isinf(need.value):
                least = before
            else:
                least = int(need.value)
            if least is None:
                floor = ""
            else:
                floor = f"; floors={{{name!r}: {least}}} keeps the guard from going below it"
            if before is None:
                was = ""
            else:
                was = f", not {before}"
            return (
                f"oomguard: {name} is {in_force[name]}{was}, because the engine ran out of memory "
                "with more; "
                f"{need.why} {'more' if least is None else least}{floor}"
            )
    return None


# A model's first argument with one entry per row; in those of text the second axis is tokens.
_TEXT: Final = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER: Final = ("pixel_values", "input_features", "input_values", "hidden_states", "x", "input")


def seen_call(error: BaseException) -> dict[str, Fact]:
    """Return the rows and tokens of the outermost model call in a failure, if there is one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    # A frame holds the user's objects, whose errors must not replace the failure.
    with contextlib.suppress(Exception):
        found = next((call for frame in frames_of(error) if (call := _call_in(frame, torch))), {})
        return {name: Fact(name, value, "measured") for name, value in found.items()}
    return {}


def _call_in(frame: FrameType, torch: Any) -> dict[str, int]:
    if frame.f_code.co_name != "forward":
        return {}
    seen = locals_of(frame)
    if not isinstance(seen.get("self"), torch.nn.Module):
        return {}
    for name in (*_TEXT, *_OTHER):
        value = seen.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            if name in _TEXT:
                tokens = {"prompt_tokens": value.shape[1]}
            else:
                tokens = {}
            return {"batch_size": value.shape[0], **tokens}
    return {}


def note_row_arguments(
    error: BaseException, function: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """Name the decorated function's own arguments to split, if a note advises a decorator.

    Such a note knows the arguments of a model, or no name.
    """
    notes = "".join(getattr(error, "__notes__", ()))
    if "@oomguard.guard" not in notes:
        return
    with contextlib.suppress(Exception):  # the user's objects must not replace the failure
        names = _row_arguments(function, args, kwargs)
        batch = ", ".join(f'"{name}"' for name in names)
        if len(names) > 1:
            batch = f"({batch})"
        line = f"@oomguard.guard(batch={batch}) above def {function.__name__}"
        if names and line not in notes:
            add_note(error, f"oomguard: if no row depends on the others, write {line}")


def _row_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """Return the arguments with as many entries as the first that has several."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    sizes = {
        name: rows_of(value) for name, value in given.items() if why_not_cut(name, value) is None
    }
    rows = next((size for size in sizes.values() if size > 1), 0)
    return [name for name, size in sizes.items() if rows and size == rows]


# The advice for a model's method that no guard watches.

_GENERATION: Final = "transformers.generation.utils"
_TAKEN_EARLIER: Final = (
    "oomguard: not run in parts: the program took this `generate` from its model before its first "
    "guard, so the guard cannot watch it. Write model.generate(...) inside the guard, or "
    "oomguard.guard(generate)"
)
_CALLS: Final = frozenset({"_wrapped_call_impl", "_call_impl", "__call__", "forward"})


def note_if_taken_earlier(error: BaseException) -> None:
    """Add a note to a failure in a ``generate`` that was taken from its model before the guard.

    A function with ``batch=`` runs ``generate`` unwatched on purpose, so it gets no note.
    """
    for frame in frames_of(error):
        if module_of(frame).startswith(("oomguard.engines", "oomguard.guarding.micro_batch")):
            return
        if frame.f_code.co_name == "generate" and module_of(frame) == _GENERATION:
            if _TAKEN_EARLIER not in getattr(error, "__notes__", ()):
                error.add_note(_TAKEN_EARLIER)
            return


def unwatched(error: BaseException) -> str | None:
    """Return the note for a failure in a method or module that no guard watches; None otherwise."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # A frame holds the user's objects, whose errors must not replace the failure.
    with contextlib.suppress(Exception):
        for frame in frames_of(error):
            seen = locals_of(frame)
            if isinstance(module := seen.get("self"), torch.nn.Module):
                return _advice_for(frame, module, seen, torch)
    return None


def _advice_for(frame: FrameType, module: Any, seen: dict[str, Any], torch: Any) -> str | None:
    name = type(module).__name__
    is_call = frame.f_code.co_name in _CALLS
    if is_call and any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return None  # this call is watched, and was given up
    if module_of(frame).startswith("oomguard"):
        return None
    if is_call:
        what = f"a call of {name}"
    else:
        what = f"{name}.{frame.f_code.co_name}"
    rows, others = _rows(frame, seen, torch)
    if others:
        return (
            f"oomguard: not run in parts: {what} is not watched, and {others[0]} does not have one "
            f"entry per row. Put it, and the call that returned {others[0]}, into one function "
            "under @oomguard.guard(batch=NAME). NAME is an argument with one entry per row"
        )
    batch = ", ".join(f'"{row}"' for row in rows)
    if len(rows) > 1:
        several = f"({batch})"
    else:
        several = batch or "NAME"
    return (
        f"oomguard: not run in parts: {what} is not watched. If no row depends on the others, call "
        "it in a function whose arguments have one entry per row: "
        f"@oomguard.guard(batch={several}) above def f({', '.join(rows) or 'NAME'})"
    )


def _rows(frame: FrameType, seen: dict[str, Any], torch: Any) -> tuple[list[str], list[str]]:
    """Return a function's arguments with one entry per row, and those with other tensor sizes."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    sizes = {name: _sizes(seen.get(name), torch) for name in names if name != "self"}
    number = next((size[0] for size in sizes.values() if len(size) == 1), None)
    rows = [name for name, size in sizes.items() if size == [number]]
    return rows, [name for name, size in sizes.items() if size and size != [number]] if rows else []


def _sizes(value: Any, torch: Any) -> list[int]:
    """Return the numbers of entries of a tensor, or of the tensors in a list or tuple."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1:
            return [len(value)]
        return []
    if isinstance(value, (list, tuple)):
        return [
            len(entry) for entry in value if isinstance(entry, torch.Tensor) and entry.dim() > 1
        ]
    return []


def explained(
    error: BaseException, policy: Policy, attempts: Sequence[Attempt]
) -> Diagnosis | None:
    """Return the diagnosis of an exception, and add it to the notes; None for other failures.

    An exception from another process already has the notes of that process's guard.
    """
    scanned = scan_error(error)
    if scanned.first_cause is None:
        if explain_refusal(error, attempts):
            return None
        scanned = scan_error(error, unrecognized=True)
    if scanned.first_cause is None:
        return None
    diagnosis = assess_all(scanned, default_rules(), policy, given=seen_call(error))
    if diagnosis.first_cause is None:
        return None
    if not getattr(error, "__oomguard__", False):
        annotate(error, diagnosis.first_cause)
        if (
            "not run in parts" not in "".join(error.__notes__)
            and (note := unwatched(error)) is not None
        ):
            add_note(error, note)
    return diagnosis
