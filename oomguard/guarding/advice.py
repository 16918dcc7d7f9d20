"""Add the diagnosis and advice to an exception that leaves a guard."""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from oomguard.core.facts import Fact, FactValue, format_gib
from oomguard.core.incident import Action, Attempt, Diagnosis, Incident
from oomguard.core.presentable import drawn, engine
from oomguard.diagnosis import assess_all, default_rules
from oomguard.engines.registry import insight_of, launchers
from oomguard.guarding.collate import rows_of, why_not_cut
from oomguard.guarding.failure import (
    add_note,
    annotate,
    frames_of,
    locals_of,
    module_of,
    scan_error,
)
from oomguard.remedy.actions import action_why, ruled_out_changes
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
    patches = []
    in_force = {}
    for attempt in attempts:
        for patch in attempt.patches:
            if patch.new is not None:
                patches.append(patch)
                in_force[patch.setting] = patch.new
    # A setting may have been changed several times: the first patch has the program's own value.
    own: dict[str, FactValue | None] = {patch.setting: patch.old for patch in reversed(patches)}
    for launcher in launchers():
        for name, need in insight_of(launcher).refused_length(str(error), in_force).items():
            before = own[name]
            if (
                isinstance(before, (int, float))
                and math.isfinite(need.value)
                and need.value > before
            ):
                # The program's own value would not have been enough either.
                return None
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
        for frame in frames_of(error):
            if call := _call_in(frame, torch):
                return {name: Fact(name, value, "measured") for name, value in call.items()}
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
    # The user's objects must not replace the failure.
    with contextlib.suppress(Exception):
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
    sizes = {}
    for name, value in given.items():
        if why_not_cut(name, value) is None:
            sizes[name] = rows_of(value)
    rows = 0
    for size in sizes.values():
        if size > 1:
            rows = size
            break
    names: list[str] = []
    if not rows:
        return names
    for name, size in sizes.items():
        if size == rows:
            names.append(name)
    return names


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


def unwatched(error: BaseException, incident: Incident) -> str | None:
    """Return the note for a failure outside the calls that a guard watches; None otherwise."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # A frame holds the user's objects, whose errors must not replace the failure.
    with contextlib.suppress(Exception):
        for frame in frames_of(error):
            seen = locals_of(frame)
            if isinstance(module := seen.get("self"), torch.nn.Module):
                return _advice_for(frame, module, seen, torch)
        return _outside_calls(incident)
    return None


def _outside_calls(incident: Incident) -> str:
    """Return the note for a failure in the user's own code, such as the pooling of a result."""
    function = incident.facts.get("call_function")
    if function is None:
        place = "in code"
        above = "above a function that has this code"
    else:
        place = f"in {function.value}"
        above = f"above def {function.value}"
    return (
        f"oomguard: not run in parts: memory ran out {place}, outside the calls that a guard "
        "watches. If no row depends on the others, let its arguments have one entry per row, and "
        f"write @oomguard.guard(batch=NAME) {above}"
    )


def _advice_for(frame: FrameType, module: Any, seen: dict[str, Any], torch: Any) -> str | None:
    name = type(module).__name__
    is_call = frame.f_code.co_name in _CALLS
    if is_call and any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        # This call is watched, and was given up.
        return None
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
    sizes = {}
    for name in names:
        if name != "self":
            sizes[name] = _sizes(seen.get(name), torch)
    number = None
    for size in sizes.values():
        if len(size) == 1:
            number = size[0]
            break
    rows = []
    others = []
    for name, size in sizes.items():
        if size == [number]:
            rows.append(name)
        elif size:
            others.append(name)
    # Without a known number of rows, no argument can have a wrong one.
    if not rows:
        others = []
    return rows, others


def _sizes(value: Any, torch: Any) -> list[int]:
    """Return the numbers of entries of a tensor, or of the tensors in a list or tuple."""
    if isinstance(value, torch.Tensor):
        if value.dim() > 1:
            return [len(value)]
        return []
    if isinstance(value, (list, tuple)):
        numbers = []
        for entry in value:
            if isinstance(entry, torch.Tensor) and entry.dim() > 1:
                numbers.append(len(entry))
        return numbers
    return []


def explained(
    error: BaseException, policy: Policy, attempts: Sequence[Attempt]
) -> Diagnosis | None:
    """Return the diagnosis of an exception, and add it to the notes; None for other failures.

    An exception from another process already has the notes of that process's guard.
    """
    scanned = scan_error(error)
    if scanned.first_cause is None:
        # A refusal may mention memory in general words, so it comes before the search for those.
        if explain_refusal(error, attempts):
            return None
        scanned = scan_error(error, unrecognized=True)
    if scanned.first_cause is None:
        return None
    diagnosis = assess_all(scanned, default_rules(), policy, given=seen_call(error))
    if diagnosis.first_cause is None:
        return None
    # An inner guard knew the failed call, so its note stays.
    if not getattr(error, "__oomguard__", False):
        annotate(error, diagnosis.first_cause)
        why = unwatched(error, diagnosis.first_cause)
        if why is not None and "not run in parts" not in "".join(error.__notes__):
            add_note(error, why)
    return diagnosis


# The note on a re-raised exception is the diagnosis in a few plain lines.


# A fact that only a guard measures, after it has tried every change that could help.
_MEASURED: Final = "prompt_tokens"


def note_in_guard(
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    why_whole: str | None = None,
    why_not_joined: str | None = None,
) -> str:
    """Return the note of a failure that leaves a guard.

    In a measured call, a change without a value cannot help, and one short line says why. If the
    call was not run in parts, the line to write comes first.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that the guard made.
        why_whole: why the call was not run in parts, and what to write instead.
        why_not_joined: why the results of the parts cannot be joined, and what to write instead. It
            replaces the cause and the actions, because each part fits.
    """
    if why_not_joined is not None:
        lines = [f"oomguard: {drawn(incident).headline}", *tried(drawn(tuple(attempts)))]
        return "\n".join([*lines, f"  why: {why_not_joined}"])
    has_one_row = incident.number("batch_size") == 1
    if why_whole is not None or has_one_row:
        hidden = "batch_size"
    else:
        hidden = ""
    is_measured = _MEASURED in incident.facts
    useless = []
    named = []
    others = []
    for one in incident.actions:
        # The call cannot have fewer rows, so a smaller batch is not advice.
        if one.id == hidden:
            continue
        if is_measured and one.applicability == "needs-value":
            useless.append(_why_useless(one))
        elif one.id != "wrap_in_guard":
            others.append(one)
        # A guard is active, so only advice that names arguments is new.
        elif "batch=" in (one.command or ""):
            named.append(replace(one, title="Name the argument that has one entry per row"))
    text = note(replace(incident, actions=(*named, *others)), attempts, first=why_whole)
    return "\n".join([text, *useless])


def _why_useless(action: Action) -> str:
    """Return a line that says why a change cannot help: the reason follows the lever's text."""
    reason = action.why.partition("; ")[2] or action.why
    return f"  cannot help: {action.id}: {reason}"


def note(
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    *,
    of_command: bool = False,
    first: str | None = None,
) -> str:
    """Return the note: failure, cause, attempts, actions and unknowns, one per line.

    Args:
        incident: the failure with its causes and actions.
        attempts: the attempts that were made.
        of_command: whether to spell a change as a flag instead of a keyword argument.
        first: why a call was not split, and what to write instead; None for no such line.
    """
    incident = drawn(incident)
    attempts = drawn(tuple(attempts))
    lines = [f"oomguard: {incident.headline}"]
    if incident.causes:
        cause = incident.causes[0]
        lines.append(
            f"  why: {cause.title} ({cause.id}, confidence {cause.confidence:.2f}). "
            f"{cause.explanation}"
        )
    lines += tried(attempts)
    if first is not None:
        lines.append(f"  not run in parts: {first}")
    has_line_to_write = first is not None and "@oomguard.guard(" in first
    for number, action in enumerate(incident.actions):
        if number == 0 and not has_line_to_write:
            start = "do first"
        else:
            start = "then"
        command = _command(action, incident, of_command=of_command)
        if action.blocked_by:
            blocked = f" [not automatic: {action.blocked_by}]"
        else:
            blocked = ""
        if action.effect is None:
            effect = ""
        else:
            effect = f" ({action.effect})"
        if command:
            pasted = f": {command}"
        else:
            pasted = ""
        lines.append(
            f"  {start}: {action.title}{effect}{pasted}. {action_why(action)}{blocked}".rstrip()
        )
    lines += [f"  not changed: {text}" for text in ruled_out_changes(incident)]
    if incident.unknown:
        lines.append(f"  unknown: {' '.join(incident.unknown)}")
    if incident.missing:
        lines.append(f"  to decide: {incident.missing.what}: {incident.missing.command}")
    return "\n".join(lines)


def _command(action: Action, incident: Incident, *, of_command: bool) -> str | None:
    """Return the text to paste: the flag of a command, or the keyword argument of a call."""
    if of_command:
        return action.command
    for patch in incident.plan:
        if patch.setting == action.id and patch.new == action.new:
            return patch.as_kwarg or action.command
    return action.command


def tried(attempts: Sequence[Attempt]) -> list[str]:
    """Return one line for each attempt that changed something, with its result."""
    lines = []
    for attempt in attempts:
        # The first attempt is the call as the user made it, so it is not a try.
        if attempt.patches:
            changes = ", ".join(f"{p.setting} {p.old} -> {p.new}" for p in attempt.patches)
            lines.append(f"  tried: {changes}: {attempt.error or 'ran'}")
    return lines


def start_note(incident: Incident, attempts: Sequence[Attempt] = ()) -> str:
    """Return the note on a failed engine start: ``note`` plus the process and the budget."""
    lines = note(incident, attempts).split("\n")
    shown = drawn(incident)
    if shown.causes:
        behind = 2
    else:
        behind = 1
    if shown.phase == "unknown":
        phase = ""
    else:
        phase = shown.phase.replace("_", " ")
    where = ", ".join(filter(None, (engine(shown), phase, shown.location.process)))
    more = []
    if where:
        more.append(f"  where: {where}")
    budget = _budget(shown)
    if budget:
        more.append(f"  budget: {budget}")
    return "\n".join([*lines[:behind], *more, *lines[behind:]])


def _budget(incident: Incident) -> str:
    """Return the known parts of the device's memory; "" if no part is known."""
    parts = []
    for part in incident.budget.parts:
        parts.append(f"{part.name.replace('_', ' ')} {format_gib(part.bytes)}")
    total = incident.budget.device_total_bytes
    if not parts:
        return ""
    return f"{', '.join(parts)}{'' if total is None else f' of {format_gib(total)}'}"
