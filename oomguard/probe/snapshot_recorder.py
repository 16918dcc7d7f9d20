"""Take a snapshot where an allocation fails: torch's own recording, from the first use of CUDA on,
and its dump at the first refusal.

torch calls an observer when its allocator gives up, before anything is raised, so before a frame
ends and its tensors go. What cannot be taken is a note: nothing here may take the place of the
failure, or make it worse. Standard library and torch only.
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

# The last events, as torch's own guide has it: about 30 MB of memory, and of the file.
MOST_EVENTS: Final = 100_000
# Tells engines that this process starts where to put theirs: vLLM's plugin reads it in each of its
# processes.
VARIABLE: Final = "OOMGUARD_SNAPSHOT"
_MOST_FILES: Final = 10_000

# The recordings that are on, innermost last; the observer stays with torch for good, and asks here.
_open: Final[list[Recording]] = []
_observed: Final[list[bool]] = []
_lock = threading.Lock()


class Recording:
    """One recording: it begins with CUDA's first use, is dumped once, and may be entered several
    times at once.

    Args:
        path: where the snapshot goes; where there is a file already, ``NAME-1``, ``NAME-2`` and so
            on.

    Attributes:
        taken: the file that was written; None as long as there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.taken: Path | None = None
        self._entered = 0
        self._is_done = self._is_ours = self._is_told = self._is_handed_on = False

    @property
    def is_on(self) -> bool:
        """Whether it was begun and has not ended."""
        return self._entered > 0

    def begin(self) -> None:
        """Record from now on, or from CUDA's first use on; warn once, in one line, where there is
        no CUDA to record.
        """
        with _lock:
            self._entered += 1
            is_first = self._entered == 1
        if not is_first or self._is_done:
            return
        torch = _torch()
        why_not = _why_not(torch)
        if why_not is not None:
            if not self._is_told:
                _tell(f"no memory snapshot will be taken: {why_not}")
            self._is_told = True
            return
        with _lock:
            _open.append(self)
        if VARIABLE not in os.environ:
            os.environ[VARIABLE], self._is_handed_on = str(self.path), True
        with _noting("recording for a memory snapshot"):
            torch.cuda._lazy_call(self._record)

    def _record(self) -> None:
        """Have torch record; also called by torch itself, where CUDA is first used, which must not
        fail for it.
        """
        if not self.is_on or self._is_ours:
            return
        with _noting("recording for a memory snapshot"):
            torch = _torch()
            is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
            if is_on is None or not is_on():  # what the program records by itself stays as it is
                torch.cuda.memory._record_memory_history(
                    context="alloc", stacks="python", max_entries=MOST_EVENTS
                )
                self._is_ours = True
            attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
            if attach is not None and not _observed:
                attach(_refused)
                _observed.append(True)

    def take(self) -> Path | None:
        """Dump the snapshot, once, before anything is freed; return its file, None where it was
        taken before or cannot be.
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
                older = f" ({self.path.name} is older, and was kept)"
            _tell(f"memory snapshot taken: {self.taken}{older}; oomguard diagnose {self.taken}")
        return self.taken

    def end(self) -> None:
        """Stop recording, unless it is entered still; where another recording goes on, that one
        ends it.
        """
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
    """Record in this process for good, once, where there is a GPU; never raises."""
    with contextlib.suppress(Exception):
        if not _open and _why_not(_torch()) is None:
            Recording(path).begin()


def _refused(_device: int, _size: int, _device_total: int, _device_free: int) -> None:
    """Take what is to be taken: torch calls it when its allocator gives up."""
    with contextlib.suppress(Exception):
        for recording in reversed(_open):
            recording.take()


def _dumped(torch: Any, path: Path) -> Path:
    """Write the snapshot under the first free name, whole or not at all. Raises OSError, and what
    torch raises.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        torch.cuda.memory._dump_snapshot(str(partial))
        for candidate in _names(path):
            with contextlib.suppress(FileExistsError):
                candidate.touch(
                    exist_ok=False
                )  # several processes may come to one name at once: the first has it
                try:
                    partial.replace(candidate)
                except OSError:
                    candidate.unlink(missing_ok=True)
                    raise
                return candidate
    finally:
        partial.unlink(missing_ok=True)
    raise FileExistsError(f"{_MOST_FILES} snapshots of this name are there")


def _names(path: Path) -> Iterator[Path]:
    yield path
    for number in range(1, _MOST_FILES):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def _torch() -> Any:
    """Return torch, loaded if it can be; None without it."""
    with contextlib.suppress(ImportError):
        import torch

        return torch
    return None


def _why_not(torch: Any) -> str | None:
    """Return why there is nothing to record, None where there may be; CUDA is not begun for the
    answer.
    """
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
    """Log in one line what goes wrong with us; a failing dump is a note and no error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        # torch and the file system raise anything, and none of it may reach the program
        reason = str(error).partition("\n")[0][:200]
        _tell(f"{what} failed: {type(error).__name__}: {reason}")


def _tell(text: str) -> None:
    with contextlib.suppress(Exception):  # a handler of the program's that raises
        logging.getLogger("oomguard").warning("oomguard: %s", text)
