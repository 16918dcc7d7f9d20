"""Whether code trains: a training step that is run in parts is applied several times, so it is
never split.

A failure's frames tell it where they go through a backward pass, an optimizer or a recorded graph.
Where they do not, the parts run with gradients watched: the first operation that records one is
refused, before anything is applied.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from oomguard.guarding.failure import frames_of, locals_of, module_of

WHY_NOT: Final = (
    "gradients are recorded, and a training step that is run in parts is applied several times; "
    "what is no training belongs under torch.inference_mode()"
)
# Libraries whose code names a backward pass whether or not it runs one.
_LIBRARIES: Final = frozenset({"torch", "transformers", "accelerate", "peft", "oomguard"})
_MODES: Final = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_STEPS: Final = ("torch.optim", "torch.autograd.graph")


class GradientRecorded(Exception):  # noqa: N818 - it never leaves the guard
    """A part of a call began to record gradients."""


def trains(error: BaseException) -> bool:
    """Return whether a failure's frames are of a training step; call it before their locals are
    dropped, with gradients as they were.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    frames = list(frames_of(error))
    seen = [_values(frame) for frame in frames]
    off = any(map(_turns_gradients_off, frames)) or any(
        _is_mode(value, torch) for values in seen for value in values
    )
    recording = torch.is_grad_enabled() and not off
    return any(map(_steps, frames)) or any(
        _is_recorded(value, torch, recording=recording) for values in seen for value in values
    )


@contextlib.contextmanager
def refusing_gradients(*, really: bool = True) -> Iterator[None]:
    """Raise GradientRecorded from the first operation inside that saves a tensor for a backward
    pass, in this thread.
    """
    torch = sys.modules.get("torch")
    if torch is None or not really:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse):
        yield


def _refuse(_tensor: Any) -> Any:
    raise GradientRecorded(WHY_NOT)


def _values(frame: FrameType) -> list[Any]:
    """Return what a frame's code sees: its locals, those of functions around it, and in the user's
    code the globals it names.
    """
    values = list(locals_of(frame).values())
    if not _is_library(frame):
        values += [
            frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals
        ]
    return values


def _steps(frame: FrameType) -> bool:
    """Return whether a frame is of an optimizer or a backward pass, or of the user's code that
    names one.
    """
    return module_of(frame).startswith(_STEPS) or (
        not _is_library(frame) and "backward" in frame.f_code.co_names
    )


def _is_mode(value: Any, torch: Any) -> bool:
    modes = (torch.no_grad, torch.inference_mode)
    if isinstance(value, type):
        return value in modes
    return isinstance(value, modes)


def _is_recorded(value: Any, torch: Any, *, recording: bool) -> bool:
    """Return whether a value stands in a graph, or will once an operation reads it."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None or (recording and bool(value.requires_grad))
    if not recording or not isinstance(value, torch.nn.Module) or not value.training:
        return False  # a model in evaluation mode is used for inference
    return any(parameter.requires_grad for parameter in value.parameters())


def _turns_gradients_off(frame: FrameType) -> bool:
    """Return whether a frame's code names a mode without gradients, or is torch's
    decorator of one.
    """
    module = module_of(frame)
    if module.partition(".")[0] == "torch":
        return module == "torch.utils._contextlib"
    return not _MODES.isdisjoint(frame.f_code.co_names)


def _is_library(frame: FrameType) -> bool:
    return module_of(frame).partition(".")[0] in _LIBRARIES
