"""Read a failure inside this process: its exception, what its frames hold, and its notes.

The modules that explain a failure load with the first one, so that other programs need not wait.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact
from oomguard.core.incident import Attempt, Diagnosis, Incident, SettingInForce
from oomguard.probe import torch_memory

if TYPE_CHECKING:
    from oomguard.engines.protocol import WatchedCall
    from oomguard.probe.snapshot_recorder import SnapshotRecorder
    from oomguard.remedy.failed_call import CallModel


def snapshot_path(given: str | Path | None) -> Path | None:
    """Return the absolute path of the snapshot; None if none is requested.

    Raises:
        SettingError: it is a folder, its folder does not exist, or it is not a path.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        path = Path(given).absolute()
    else:
        path = None
    if path is None or "\0" in str(path) or path.is_dir() or not path.parent.is_dir():
        if path is None:
            what = "is not a path"
        elif path.is_dir():
            what = "is a folder"
        else:
            what = "its folder does not exist"
        raise SettingError(
            f"snapshot={(given if path is None else str(given))!r}: {what}",
            hint="Name a file in a folder that exists: snapshot.pickle",
        )
    return path


def take_at(error: BaseException, recording: SnapshotRecorder | None) -> None:
    """Take the snapshot if torch's allocator refused an allocation, and took none itself."""
    if recording is None:
        return
    from oomguard.scan.exceptions import chain

    if any(type(link).__name__ == "OutOfMemoryError" for link in chain(error)):
        recording.take()


# Frames are read without keeping anything in them alive.


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an exception and its chain, outermost first."""
    from oomguard.scan.exceptions import chain

    for link in chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            yield frame


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's locals; for a module's own code these are its globals."""
    seen = frame.f_locals
    copy = dict(seen)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        with contextlib.suppress(Exception):
            # Before Python 3.13, a function's frame keeps this copy alive, with its tensors.
            seen.clear()
    return copy


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def is_memory_failure(error: BaseException) -> bool:
    """Return whether an exception's type may mean that memory ran out."""
    from oomguard.scan.exceptions import may_be_oom

    return may_be_oom(error)


def run_guarded(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, BaseException | None]:
    """Return the function's result and None, or None and its exception.

    The exception's traceback starts at the function's own frames.
    """
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001
        # The caller judges it. No local holds the traceback, because that would be a cycle with
        # this frame, which would keep the inputs until a garbage collection.
        return None, error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def scan_error(
    error: BaseException,
    settings: Mapping[str, SettingInForce] | None = None,
    *,
    unrecognized: bool = False,
) -> Diagnosis:
    """Return the failures in an exception's messages; none if its type is not a memory failure.

    ``unrecognized``: general words count too, which is enough for a report but not for a change.
    """
    from oomguard.scan.exceptions import exception_lines, may_be_oom

    # Most failures have another type, and the rules take a moment to load.
    if not may_be_oom(error):
        return Diagnosis(type(error).__name__)
    from oomguard.diagnosis import default_rules
    from oomguard.scan.scan import scan

    lines = exception_lines(error)
    name = type(error).__name__
    return scan(lines, default_rules(), name, given=settings, unrecognized=unrecognized)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception's messages say that memory ran out."""
    from oomguard.diagnosis import default_rules
    from oomguard.scan.exceptions import exception_lines, may_be_oom
    from oomguard.scan.scan import scan

    if not may_be_oom(error):
        return False
    lines = exception_lines(error, with_frames=False)
    return scan(lines, default_rules(), type(error).__name__).first_cause is not None


def in_phase(diagnosis: Diagnosis, phase: str | None) -> Diagnosis:
    """Return a diagnosis in the phase that the guard knows; that is better than function names.

    Without a known phase the frames decide, except for training, which is detected elsewhere.
    """
    incidents = []
    for incident in diagnosis.incidents:
        if phase:
            known = phase
        elif incident.phase == "training":
            known = "unknown"
        else:
            known = incident.phase
        incidents.append(replace(incident, phase=known))
    return replace(diagnosis, incidents=tuple(incidents))


def facts_of(call: WatchedCall, model: CallModel) -> dict[str, Fact]:
    """Return the facts of a failed call for rules and reports."""
    values = {
        "batch_size": model.rows,
        "rows_run_apart": model.not_splittable is None and model.rows > 1,
        "prompt_tokens": call.prompt_tokens,
        "max_new_tokens": call.max_new_tokens,
        "baseline_bytes": model.base_bytes,
        "held_before_call_bytes": _held_before(call.model, model.base_bytes),
    }
    facts = {}
    for name, value in values.items():
        if value is not None:
            facts[name] = Fact(name, value, "measured")
    return facts


def _held_before(model: Any, base_bytes: int | None) -> int | None:
    """Return the bytes allocated before a call besides its model; None if they are unknown."""
    if base_bytes is None or not hasattr(model, "parameters"):
        return None
    return max(0, base_bytes - _bytes_of([*model.parameters(), *model.buffers()]))


# If less than this fraction of what the failed call held is left, a full collection is not needed.
_LEFT_SHARE: Final = 4


def release_after(failure: Incident, call: WatchedCall, rows: int) -> None:
    """Free what a failed call left behind, after its frames are cleared.

    Cycles may keep tensors alive. A full garbage collection finds them all, but it takes longer
    than many calls, so it runs only if much is left, or if a single row failed.
    """
    torch_memory.release(newest_only=True)
    live = torch_memory.live_bytes(call.model)
    before = _live_before(call)
    held = failure.number("allocated_bytes")
    # A single row cannot be split further, so every byte counts.
    if rows == 1 or live is None or before is None or held is None:
        torch_memory.release()
        return
    if (live - before) * _LEFT_SHARE > held - before:
        torch_memory.release()


def _live_before(call: WatchedCall) -> int | None:
    """Return the bytes that a call found allocated, or at least its model's and its inputs'."""
    recorded: int | None = getattr(call, "live_before_bytes", None)
    if recorded is not None or not hasattr(call.model, "parameters"):
        return recorded
    inputs = []
    for value in (*call.args, *call.kwargs.values()):
        if hasattr(value, "nbytes"):
            inputs.append(value)
    return _bytes_of([*call.model.parameters(), *call.model.buffers(), *inputs])


def _bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors that use device memory, each counted once."""
    # Tied weights and buffers share their memory.
    distinct = {}
    for tensor in tensors:
        if hasattr(tensor, "data_ptr"):
            distinct[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in filter(torch_memory.counts, distinct.values()))


def row_bytes_at_failure(failure: Incident, base_bytes: int | None, rows: int) -> int | None:
    """Return the bytes per row when the call failed, from the message; None if it has none.

    The row would have needed more. ``base_bytes`` were allocated before the call; None: unknown.
    """
    tried = failure.number("tried_bytes")
    live = failure.number("allocated_bytes") or failure.number("process_in_use_bytes")
    if base_bytes is None or tried is None or live is None or rows < 1:
        return None
    return max(1, round((live + tried - base_bytes) / rows))


def clear(error: BaseException, *, is_raised: bool = True) -> None:
    """Clear the locals of a failure's frames, which hold the failed call's tensors.

    An exception that is not raised (``is_raised``) loses its frames too.
    """
    from oomguard.scan.exceptions import chain

    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            # The call of a module with hooks keeps its arguments in a closure, which clearing the
            # frame does not empty.
            if module_of(frame) == "torch.nn.modules.module" and frame.f_code.co_freevars:
                _empty_closure(frame)
    if not is_raised:
        forget(error)


def forget(error: BaseException | None) -> None:
    """Drop the frames of a failure that is not raised; a cycle with them would keep the inputs."""
    if error is None:
        return
    from oomguard.scan.exceptions import chain

    for link in chain(error):
        link.__traceback__ = None


def let_go(error: BaseException) -> None:
    """Clear the frames that called those of a failure, if they have ended; one may hold it."""
    from oomguard.scan.exceptions import chain

    for link in chain(error):
        frame = link.__traceback__ and link.__traceback__.tb_frame.f_back
        # A frame that still runs cannot be cleared: this one, and those around it.
        with contextlib.suppress(RuntimeError):
            while frame is not None:
                frame.clear()
                frame = frame.f_back


def _empty_closure(frame: FrameType) -> None:
    """Clear the closure of a module call with hooks, which holds the call's arguments."""
    for function in gc.get_referents(frame):
        if isinstance(function, FunctionType) and function.__code__ is frame.f_code:
            for cell in function.__closure__ or ():
                # Reading an empty cell raises.
                with contextlib.suppress(ValueError):
                    if isinstance(cell.cell_contents, (dict, tuple)):
                        del cell.cell_contents


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, if its type accepts notes."""
    with contextlib.suppress(AttributeError, TypeError):
        error.add_note(text)


def annotate(
    error: BaseException,
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    *,
    why_whole: str | None = None,
    why_not_joined: str | None = None,
) -> None:
    """Add the diagnosis to an exception's notes, and mark the exception as explained.

    If an inner guard has explained it, that note stays, because that guard knew the failed call.
    Only the attempts made here are added.

    Args:
        error: the exception that leaves the guard.
        incident: the failure with its causes and actions.
        attempts: the attempts made here.
        why_whole: why the call was not split, and what to write instead; None: no reason.
        why_not_joined: why the parts' results cannot be joined; None: that was not tried.
    """
    from oomguard.guarding.advice import note_in_guard, tried

    if getattr(error, "__oomguard__", False):
        for line in tried(attempts):
            add_note(error, f"oomguard: around that,{line.strip().removeprefix('tried:')}")
        return
    add_note(error, note_in_guard(incident, attempts, why_whole, why_not_joined))
    # Some exception types accept no other attributes.
    with contextlib.suppress(AttributeError, TypeError):
        error.__oomguard__ = True  # type: ignore[attr-defined]


# Training is never split: a step in parts would be applied several times.


WHY_NOT: Final = (
    "the call records gradients, and a training step in parts would be applied several times; "
    "put inference under torch.inference_mode()"
)
# Libraries whose code mentions a backward pass whether it runs one or not.
_LIBRARIES: Final = frozenset({"torch", "transformers", "accelerate", "peft", "oomguard"})
_MODES: Final = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_STEPS: Final = ("torch.optim", "torch.autograd.graph")


class GradientRecorded(Exception):  # noqa: N818 - it never leaves the guard
    """A part of a call began to record gradients."""


def trains(error: BaseException) -> bool:
    """Return whether a failure's frames belong to a training step.

    Call this before the frames' locals are cleared, with gradients as they were.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    frames = list(frames_of(error))
    # The exception has left the `with` blocks of the frames, so torch's present mode is not theirs.
    seen = list(chain.from_iterable(map(_values, frames)))
    off = any(map(_turns_gradients_off, frames)) or any(_is_mode(value, torch) for value in seen)
    recording = torch.is_grad_enabled() and not off
    if any(map(_steps, frames)):
        return True
    return any(_is_recorded(value, torch, recording=recording) for value in seen)


@contextlib.contextmanager
def refusing_gradients(*, really: bool = True) -> Iterator[None]:
    """Raise GradientRecorded from the first operation in the block that records a gradient.

    It applies to the current thread only.
    """
    # If torch is not loaded, no operation can record a gradient.
    torch = sys.modules.get("torch")
    if torch is None or not really:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse):
        yield


def _refuse(_tensor: Any) -> Any:
    raise GradientRecorded(WHY_NOT)


def _values(frame: FrameType) -> list[Any]:
    """Return the values that a frame's code sees: locals, closures, and named globals of users."""
    values = list(locals_of(frame).values())
    if not _is_library(frame):
        for name in frame.f_code.co_names:
            if name in frame.f_globals:
                values.append(frame.f_globals[name])
    return values


def _steps(frame: FrameType) -> bool:
    """Return whether a frame belongs to an optimizer or a backward pass, or calls one by name."""
    return module_of(frame).startswith(_STEPS) or (
        not _is_library(frame) and "backward" in frame.f_code.co_names
    )


def _is_mode(value: Any, torch: Any) -> bool:
    modes = (torch.no_grad, torch.inference_mode)
    if isinstance(value, type):
        return value in modes
    return isinstance(value, modes)


def _is_recorded(value: Any, torch: Any, *, recording: bool) -> bool:
    """Return whether a value is part of a graph, or will be once an operation reads it."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None or (recording and bool(value.requires_grad))
    if not recording or not isinstance(value, torch.nn.Module) or not value.training:
        # A model in evaluation mode is assumed to run inference.
        return False
    return any(parameter.requires_grad for parameter in value.parameters())


def _turns_gradients_off(frame: FrameType) -> bool:
    """Return whether a frame's code turns gradients off, or is torch's decorator for that."""
    module = module_of(frame)
    if module.partition(".")[0] == "torch":
        return module == "torch.utils._contextlib"
    return not _MODES.isdisjoint(frame.f_code.co_names)


def _is_library(frame: FrameType) -> bool:
    return module_of(frame).partition(".")[0] in _LIBRARIES
