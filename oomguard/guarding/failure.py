"""A failure inside the process: what its exception says, what it held, and the note it leaves with.

What explains a failure is imported with the first one: a program that sees none does not wait for
it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from oomguard.core.errors import SettingError
from oomguard.core.facts import Fact
from oomguard.core.incident import Attempt, Diagnosis, Incident, SettingInForce
from oomguard.engines.protocol import WatchedCall
from oomguard.probe import torch_memory
from oomguard.probe.snapshot_recorder import Recording
from oomguard.scan.exceptions import chain, exception_lines, may_be_oom

if TYPE_CHECKING:
    from oomguard.remedy.failed_call import CallModel


# The memory snapshot that a guard or a loop of attempts is asked for: where it goes, and for which
# failure it is taken.


def snapshot_path(given: str | Path | None) -> Path | None:
    """Return where the snapshot goes, None where none is asked for.

    Raises:
        SettingError: a folder, a file in none, and what is no path.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        path = Path(given).absolute()
    else:
        path = None
    if path is None or "\0" in str(path) or path.is_dir() or not path.parent.is_dir():
        if path is None:
            what = "is no path"
        elif path.is_dir():
            what = "is a folder"
        else:
            what = "its folder is not there"
        raise SettingError(
            f"snapshot={(given if path is None else str(given))!r}: {what}",
            hint="name a file in a folder that exists: snapshot.pickle",
        )
    return path


def take_at(error: BaseException, recording: Recording | None) -> None:
    """Take the snapshot where torch's allocator refused something and did not call for
    one itself.
    """
    if recording is not None and any(
        type(link).__name__ == "OutOfMemoryError" for link in chain(error)
    ):
        recording.take()


# What the frames of a failure hold, looked at without making any of it live longer.


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an exception and its chain, outermost first."""
    for link in chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            yield frame


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of a frame's locals; those of a module's own code are its globals, which stay
    as they are.
    """
    seen = frame.f_locals
    copy = dict(seen)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        with contextlib.suppress(Exception):
            # before Python 3.13 a function's frame keeps this copy of its locals, tensors too
            seen.clear()
    return copy


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def run_guarded(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, BaseException | None]:
    """Return the function's result and None, or None and its exception with a traceback that starts
    at its own frames.
    """
    try:
        return function(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001
        # judged by the caller, and raised again unless it is remedied
        # No local holds the traceback: it would hold this frame, a cycle that keeps the inputs
        # until a collection.
        return None, error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def scan_error(
    error: BaseException,
    settings: Mapping[str, SettingInForce] | None = None,
    *,
    unrecognized: bool = False,
) -> Diagnosis:
    """Return what an exception's messages say, not yet explained; no incidents where its type
    cannot be a memory failure.

    With ``unrecognized`` words count that no signature has: enough to tell, too little to act on.
    """
    if not may_be_oom(error):
        return Diagnosis(type(error).__name__)
    from oomguard.diagnosis.diagnose import default_rules
    from oomguard.scan.scan import scan

    lines = exception_lines(error)
    name = type(error).__name__
    return scan(lines, default_rules(), name, given=settings, unrecognized=unrecognized)


def in_phase(diagnosis: Diagnosis, phase: str | None) -> Diagnosis:
    """Return what a guarded call's exception says, in the phase that its guard knows: names of
    files and functions tell less.

    Where it knows none, the frames count, but not those of training: what trains is known.
    """
    incidents = tuple(
        replace(
            incident, phase=phase or ("unknown" if incident.phase == "training" else incident.phase)
        )
        for incident in diagnosis.incidents
    )
    return replace(diagnosis, incidents=incidents)


def facts_of(call: WatchedCall, model: CallModel) -> dict[str, Fact]:
    """Return what rules and reports may know of a guarded call that failed."""
    values = {
        "batch_size": model.rows,
        "rows_run_apart": model.not_splittable is None and model.rows > 1,
        "prompt_tokens": call.prompt_tokens,
        "max_new_tokens": call.max_new_tokens,
        "baseline_bytes": model.base_bytes,
        "held_before_call_bytes": _held_before(call.model, model.base_bytes),
    }
    return {
        name: Fact(name, value, "measured") for name, value in values.items() if value is not None
    }


def _held_before(model: Any, base_bytes: int | None) -> int | None:
    """Return the bytes that were alive before a call besides its model's; None if there is no
    model, or nothing counts them.
    """
    if base_bytes is None or not hasattr(model, "parameters"):
        return None
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    weights: int = sum(tensor.nbytes for tensor in tensors.values() if torch_memory.counts(tensor))
    return max(0, base_bytes - weights)


def row_bytes_at_failure(failure: Incident, base_bytes: int | None, rows: int) -> int | None:
    """Return the bytes that one row held when the call failed, by the live bytes in the message;
    None where it has none.

    The row would have gone on to more. ``base_bytes`` are those alive before the call.
    """
    tried = failure.number("tried_bytes")
    live = failure.number("allocated_bytes") or failure.number("process_in_use_bytes")
    if base_bytes is None or tried is None or live is None or rows < 1:
        return None
    return max(1, round((live + tried - base_bytes) / rows))


def clear(error: BaseException, *, is_raised: bool = True) -> None:
    """Drop the locals of the frames in an exception's traceback and its chain: they hold the failed
    call's tensors.

    One that is not to be raised loses the frames too.
    """
    for link in chain(error):
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if module_of(frame) == "torch.nn.modules.module" and frame.f_code.co_freevars:
                _empty_closure(frame)
    if not is_raised:
        forget(error)


def forget(error: BaseException | None) -> None:
    """Drop the frames of a failure that nobody will see: their callers hold it, a cycle that keeps
    the inputs until a collection.
    """
    for link in () if error is None else chain(error):
        link.__traceback__ = None


def let_go(error: BaseException) -> None:
    """Drop the locals of the frames that called those of a failure, as far as they have ended: one
    of them may hold the failure.
    """
    for link in chain(error):
        frame = link.__traceback__ and link.__traceback__.tb_frame.f_back
        with contextlib.suppress(RuntimeError):  # this one, and those around it, still run
            while frame is not None:
                frame.clear()
                frame = frame.f_back


def _empty_closure(frame: FrameType) -> None:
    """Drop what the call of a module with hooks holds: its arguments are in a closure of its own,
    which outlives its frame's locals.
    """
    for function in gc.get_referents(frame):
        if isinstance(function, FunctionType) and function.__code__ is frame.f_code:
            for cell in function.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty already
                    if isinstance(cell.cell_contents, (dict, tuple)):
                        del cell.cell_contents


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, where it takes one."""
    with contextlib.suppress(AttributeError, TypeError):
        error.add_note(text)


def annotate(
    error: BaseException,
    incident: Incident,
    attempts: Sequence[Attempt] = (),
    *,
    why_whole: str | None = None,
) -> None:
    """Add the diagnosis to an exception's notes, and mark it as explained.

    If a guard inside has explained it, that note stays, because that guard knew the call that
    failed. Only the attempts made here are added.

    Args:
        error: the exception that leaves the guard.
        incident: the failure with its causes and actions.
        attempts: the attempts made here.
        why_whole: why the call was not run in parts, and what to write instead.
    """
    from oomguard.report.note import note_in_guard, tried

    if getattr(error, "__oomguard__", False):
        for line in tried(attempts):
            add_note(error, f"oomguard: around that,{line.strip().removeprefix('tried:')}")
        return
    add_note(error, note_in_guard(incident, attempts, why_whole))
    with contextlib.suppress(AttributeError, TypeError):
        error.__oomguard__ = True  # type: ignore[attr-defined]
