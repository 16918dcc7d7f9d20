"""A method of a model that no guard watches, as the frames of its failure show it: what to write so that it runs in parts."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Final

from oomguard.guarding.frames import frames_of, locals_of, module_of

# How torch calls a module: what stands in their frames is the module that is called.
_GENERATION: Final = "transformers.generation.utils"
_TAKEN_EARLIER: Final = (
    "oomguard: not run in parts: this `generate` was taken from its model before the first guard of the program, which "
    "cannot watch it: write model.generate(...) inside the guard, or guard what you took: oomguard.guard(generate)"
)
_CALLS: Final = frozenset({"_wrapped_call_impl", "_call_impl", "__call__", "forward"})


def note_if_taken_earlier(error: BaseException) -> None:
    """Add a note to a failure in a ``generate`` that was taken from its model before it was watched."""
    for frame in frames_of(error):
        if module_of(frame).startswith("oomguard.engines"):
            return
        if frame.f_code.co_name == "generate" and module_of(frame) == _GENERATION:
            if _TAKEN_EARLIER not in getattr(error, "__notes__", ()):
                error.add_note(_TAKEN_EARLIER)
            return


def unwatched(error: BaseException) -> str | None:
    """Return the note of a failure in a model's own method, or in a module that no guard watches; None where neither is seen."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    with contextlib.suppress(Exception):  # what a frame holds is the user's: nothing of it may take the failure's place
        for frame in frames_of(error):
            seen = locals_of(frame)
            if isinstance(module := seen.get("self"), torch.nn.Module):
                return _told(frame, module, seen, torch)
    return None


def _told(frame: FrameType, module: Any, seen: dict[str, Any], torch: Any) -> str | None:
    name, is_call = type(module).__name__, frame.f_code.co_name in _CALLS
    if is_call and any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        return None  # such a call is watched, and was given up
    if module_of(frame).startswith("oomguard"):
        return None
    what = f"a call of {name}" if is_call else f"{name}.{frame.f_code.co_name}"
    rows, others = _rows(frame, seen, torch)
    if others:
        reason = f"{what} is not watched, and {others[0]} has other entries than rows"
        together = (
            f"make it, and the call that gave {others[0]}, in one function of your own that takes what that call takes"
        )
        return f"oomguard: not run in parts: {reason}: {together}: @oomguard.guard(batch=NAME) above it, NAME what has one entry a row"
    batch = ", ".join(f'"{row}"' for row in rows)
    several = f"({batch})" if len(rows) > 1 else batch or "NAME"
    return (
        f"oomguard: not run in parts: {what} is not watched. Where no row depends on those beside it, call it in a function "
        f"of your own that takes what has one entry a row: "
        f"@oomguard.guard(batch={several}) above def f({', '.join(rows) or 'NAME'})"
    )


def _rows(frame: FrameType, seen: dict[str, Any], torch: Any) -> tuple[list[str], list[str]]:
    """Return the arguments of a frame's function with as many entries as its first tensor, and those that hold tensors of other sizes."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    sizes = {name: _sizes(seen.get(name), torch) for name in names if name != "self"}
    number = next((size[0] for size in sizes.values() if len(size) == 1), None)
    rows = [name for name, size in sizes.items() if size == [number]]
    return rows, [name for name, size in sizes.items() if size and size != [number]] if rows else []


def _sizes(value: Any, torch: Any) -> list[int]:
    """Return the entries of a tensor, or of the tensors in a list or tuple."""
    if isinstance(value, torch.Tensor):
        return [len(value)] if value.dim() > 1 else []
    if isinstance(value, (list, tuple)):
        return [len(entry) for entry in value if isinstance(entry, torch.Tensor) and entry.dim() > 1]
    return []
