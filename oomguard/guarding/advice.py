"""An exception that leaves a guard: its diagnosis, and the notes that it leaves with."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Attempt, Diagnosis
from oomguard.diagnosis.diagnose import assess_all, default_rules
from oomguard.engines.registry import insight_of, launchers
from oomguard.guarding.failure import (
    add_note,
    annotate,
    frames_of,
    locals_of,
    module_of,
    scan_error,
)
from oomguard.remedy.policy import Policy

# A request that an engine refuses since the guard gave it less: the exception says whose change
# that was.


def explain_refusal(error: BaseException, attempts: Sequence[Attempt]) -> bool:
    """Add to an exception that tells of a refused request what was changed at the engine's start,
    and return whether it is one.
    """
    note = refusal_note(error, attempts)
    if note is not None:
        error.add_note(note)
    return note is not None


def refusal_note(error: BaseException, attempts: Sequence[Attempt]) -> str | None:
    """Return the note of an exception that tells of a refused request; None where no change of ours
    is behind it.

    Args:
        error: what left the guard.
        attempts: those of the guard; the first patch of a setting has the program's own value, the
            last one that in force.
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
                return None  # the program's own value would not have done either
            if math.isinf(need.value):
                least = before
            else:
                least = int(need.value)
            if least is None:
                floor = ""
            else:
                floor = f"; with floors={{{name!r}: {least}}} the guard starts no engine below it"
            if before is None:
                was = ""
            else:
                was = f", not {before}"
            return (
                f"oomguard: {name} is {in_force[name]}{was}, since the engine ran out of memory "
                "with more; "
                f"{need.why} {'more' if least is None else least}{floor}"
            )
    return None


# The call of a model that no guard watches, as the frames of its failure show it: its rows, and the
# tokens of one.

# What a model's first argument is called where it has one row an entry; the second axis is tokens
# in those of text.
_TEXT: Final = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER: Final = ("pixel_values", "input_features", "input_values", "hidden_states", "x", "input")


def seen_call(error: BaseException) -> dict[str, Fact]:
    """Return the rows and tokens of the outermost model call that a failure went through; empty
    where none is seen.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    with contextlib.suppress(
        Exception
    ):  # what a frame holds is the user's: nothing of it may take the failure's place
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


# A method of a model that no guard watches, as the frames of its failure show it: what to write so
# that it runs in parts.

# How torch calls a module: what stands in their frames is the module that is called.
_GENERATION: Final = "transformers.generation.utils"
_TAKEN_EARLIER: Final = (
    "oomguard: not run in parts: this `generate` was taken from its model before the first guard "
    "of the program, which "
    "cannot watch it: write model.generate(...) inside the guard, or guard what you took: "
    "oomguard.guard(generate)"
)
_CALLS: Final = frozenset({"_wrapped_call_impl", "_call_impl", "__call__", "forward"})


def note_if_taken_earlier(error: BaseException) -> None:
    """Add a note to a failure in a ``generate`` that was taken from its model before it was
    watched.

    A function with ``batch=`` runs its calls of ``generate`` unwatched, so it gets no note.
    """
    for frame in frames_of(error):
        if module_of(frame).startswith(("oomguard.engines", "oomguard.guarding.micro_batch")):
            return
        if frame.f_code.co_name == "generate" and module_of(frame) == _GENERATION:
            if _TAKEN_EARLIER not in getattr(error, "__notes__", ()):
                error.add_note(_TAKEN_EARLIER)
            return


def unwatched(error: BaseException) -> str | None:
    """Return the note of a failure in a model's own method, or in a module that no guard watches;
    None where neither is seen.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    with contextlib.suppress(
        Exception
    ):  # what a frame holds is the user's: nothing of it may take the failure's place
        for frame in frames_of(error):
            seen = locals_of(frame)
            if isinstance(module := seen.get("self"), torch.nn.Module):
                return _told(frame, module, seen, torch)
    return None


def _told(frame: FrameType, module: Any, seen: dict[str, Any], torch: Any) -> str | None:
    name = type(module).__name__
    is_call = frame.f_code.co_name in _CALLS
    if is_call and any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return None  # such a call is watched, and was given up
    if module_of(frame).startswith("oomguard"):
        return None
    if is_call:
        what = f"a call of {name}"
    else:
        what = f"{name}.{frame.f_code.co_name}"
    rows, others = _rows(frame, seen, torch)
    if others:
        reason = f"{what} is not watched, and {others[0]} has other entries than rows"
        together = (
            f"make it, and the call that gave {others[0]}, in one function of your own that takes "
            "what that call takes"
        )
        return (
            f"oomguard: not run in parts: {reason}: {together}: @oomguard.guard(batch=NAME) above "
            "it, NAME what has one entry a row"
        )
    batch = ", ".join(f'"{row}"' for row in rows)
    if len(rows) > 1:
        several = f"({batch})"
    else:
        several = batch or "NAME"
    return (
        f"oomguard: not run in parts: {what} is not watched. Where no row depends on those beside "
        "it, call it in a function "
        f"of your own that takes what has one entry a row: "
        f"@oomguard.guard(batch={several}) above def f({', '.join(rows) or 'NAME'})"
    )


def _rows(frame: FrameType, seen: dict[str, Any], torch: Any) -> tuple[list[str], list[str]]:
    """Return the arguments of a frame's function with as many entries as its first tensor, and
    those that hold tensors of other sizes.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    sizes = {name: _sizes(seen.get(name), torch) for name in names if name != "self"}
    number = next((size[0] for size in sizes.values() if len(size) == 1), None)
    rows = [name for name, size in sizes.items() if size == [number]]
    return rows, [name for name, size in sizes.items() if size and size != [number]] if rows else []


def _sizes(value: Any, torch: Any) -> list[int]:
    """Return the entries of a tensor, or of the tensors in a list or tuple."""
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
    """Return the diagnosis of an exception and add it to its notes; None where it tells no memory
    failure.

    What comes from another process has been told by the guard there, if there was one: its notes
    came with it.
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
