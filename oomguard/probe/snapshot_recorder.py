"""Record torch's allocation history, and write a snapshot at the first failed allocation.

torch calls an observer when its allocator gives up, before it raises. No frame has ended then, so
no tensor was freed. A failed snapshot is only logged, because it must not replace the program's own
failure. Only the standard library and torch are imported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

# The limit of recorded events in torch's own guide: about 30 MB of memory and of file.
MOST_EVENTS: Final = 100_000
# This variable gives engines of this process the snapshot's path; vLLM's plugin reads it in each of
# its processes.
VARIABLE: Final = "OOMGUARD_SNAPSHOT"
_MOST_FILES: Final = 10_000

# Active recordings, innermost last. The observer stays in torch forever, and reads this list.
_open: Final[list[SnapshotRecorder]] = []
_observed: Final[list[bool]] = []
_lock = threading.Lock()


class SnapshotRecorder:
    """Record allocations from CUDA's first use, and write one snapshot; may be entered again.

    Args:
        path: the file of the snapshot; if it exists, ``NAME-1``, ``NAME-2`` and so on.

    Attributes:
        taken: the written file; None before that.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.taken: Path | None = None
        self._entered = 0
        self._is_done = self._is_ours = self._has_warned = self._is_handed_on = False

    @property
    def is_on(self) -> bool:
        """Whether it has begun and not ended."""
        return self._entered > 0

    def begin(self) -> None:
        """Start recording, or wait for CUDA's first use; warn once if there is no CUDA."""
        with _lock:
            self._entered += 1
            is_first = self._entered == 1
        if not is_first or self._is_done:
            return
        torch = _torch()
        why_not = _why_not(torch)
        if why_not is not None:
            if not self._has_warned:
                _warn(f"No memory snapshot will be written: {why_not}")
            self._has_warned = True
            return
        with _lock:
            _open.append(self)
        if VARIABLE not in os.environ:
            os.environ[VARIABLE], self._is_handed_on = str(self.path), True
        with _noting("recording for a memory snapshot"):
            torch.cuda._lazy_call(self._record)

    def _record(self) -> None:
        """Turn on torch's recording.

        torch may call this at CUDA's first use, so it must not fail.
        """
        if not self.is_on or self._is_ours:
            return
        with _noting("recording for a memory snapshot"):
            torch = _torch()
            is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
            # The program's own recording stays as it is.
            if is_on is None or not is_on():
                torch.cuda.memory._record_memory_history(
                    context="alloc", stacks="python", max_entries=MOST_EVENTS
                )
                self._is_ours = True
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
            if attach is not None and not _observed:
                attach(_on_out_of_memory)
                _observed.append(True)

    def take(self) -> Path | None:
        """Write the snapshot once, before anything is freed.

        Returns:
            Its file; None if it was written before or cannot be written.
        """
        torch = sys.modules.get("torch")
        if self._is_done or torch is None or not torch.cuda.is_initialized():
            return None
        self._is_done = True
        with _noting(f"the memory snapshot {self.path}"):
            self.taken = _dumped(torch, self.path)
            if self.taken == self.path:
                older = ""
            else:
                older = f" (kept the older {self.path.name})"
            _warn(
                f"Wrote memory snapshot {self.taken}{older}. Read it with: oomguard diagnose "
                f"{self.taken}"
            )
        return self.taken

    def end(self) -> None:
        """Stop recording, unless another ``with`` block or recording still needs it."""
        with _lock:
            self._entered -= 1
            if self._entered:
                return
            if self in _open:
                _open.remove(self)
            if _open:
                heir = _open[-1]
            else:
                heir = None
        if self._is_handed_on:
            os.environ.pop(VARIABLE, None)
            self._is_handed_on = False
        is_ours = self._is_ours
        self._is_ours = False
        if is_ours and heir is not None:
            heir._is_ours = True
        elif is_ours:
            with _noting("ending the recording"):
                _torch().cuda.memory._record_memory_history(enabled=None)


def record_here(path: str) -> None:
    """Record in this process permanently if it has a GPU; never raises."""
    with contextlib.suppress(Exception):
        if not _open and _why_not(_torch()) is None:
            SnapshotRecorder(path).begin()


def _on_out_of_memory(_device: int, _size: int, _device_total: int, _device_free: int) -> None:
    """Write the due snapshots; torch calls this when its allocator gives up."""
    with contextlib.suppress(Exception):
        for recording in reversed(_open):
            recording.take()


def _dumped(torch: Any, path: Path) -> Path:
    """Write the snapshot completely or not at all, under the first free name.

    Raises:
        OSError: if the file cannot be written; torch's exceptions are passed on.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        torch.cuda.memory._dump_snapshot(str(partial))
        for candidate in _names(path):
            with contextlib.suppress(FileExistsError):
                candidate.touch(
                    exist_ok=False
                )  # several processes may try the same name at once, and only one succeeds
                try:
                    partial.replace(candidate)
                except OSError:
                    candidate.unlink(missing_ok=True)
                    raise
                return candidate
    finally:
        partial.unlink(missing_ok=True)
    raise FileExistsError(
        f"{_MOST_FILES} snapshots with this name already exist; delete some or pass another path"
    )


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in range(1, _MOST_FILES):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _torch() -> Any:
    """Import and return torch; None without it."""
    with contextlib.suppress(ImportError):
        import torch

        return torch
    return None


def _why_not(torch: Any) -> str | None:
    """Return why nothing can be recorded, or None; CUDA is not initialized for that."""
    if torch is None:
        return "torch is not installed"
    if not hasattr(torch.cuda, "memory") or not hasattr(
        torch.cuda.memory, "_record_memory_history"
    ):
        return f"torch {torch.__version__} records no memory history"
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is built without CUDA"
    if torch.cuda.device_count():
        return None
    return "no GPU is visible"


@contextlib.contextmanager
def _noting(what: str) -> Iterator[None]:
    """Log an exception in one line, because a failed snapshot must not be an error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # torch and the file system raise anything, and none of it may reach the program
        reason = str(error).partition("\n")[0][:200]
        _warn(f"{what} failed: {type(error).__name__}: {reason}")


def _warn(text: str) -> None:
    # A handler of the program may raise.
    with contextlib.suppress(Exception):
        logging.getLogger("oomguard").warning("oomguard: %s", text)
