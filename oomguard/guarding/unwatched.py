"""A method of a model that no guard watches, as the frames of its failure show it: what to write so that it runs in parts."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any, Final

from oomguard.guarding.frames import frames_of, locals_of, module_of

# How torch calls a module: what stands in their frames is the module that is called.
_CALLS: Final = frozenset({"_wrapped_call_impl", "_call_impl", "__call__", "forward"})


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
    rows = _rows(frame, seen, torch)
    batch = (
        "..." if not rows else f'"{rows[0]}"' if len(rows) == 1 else "(" + ", ".join(f'"{row}"' for row in rows) + ")"
    )
    takes = ", ".join(rows) or "..."
    return (
        f"oomguard: not run in parts: {what} is not watched. Call it in a function of your own that takes what has one entry a row: "
        f"@oomguard.guard(batch={batch}) above def f({takes})"
    )


def _rows(frame: FrameType, seen: dict[str, Any], torch: Any) -> list[str]:
    """Return the arguments of a frame's function that are tensors with as many entries as the first of them."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {name: seen[name] for name in names if isinstance(seen.get(name), torch.Tensor) and seen[name].dim() > 1}
    number = next((len(tensor) for tensor in tensors.values()), None)
    return [name for name, tensor in tensors.items() if len(tensor) == number]
