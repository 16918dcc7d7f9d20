"""How much of the host's memory this process has: now, and at most in its whole life (proc(5): statm, status)."""

from __future__ import annotations

import contextlib
import os
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NOW: Final = "/proc/self/statm"
_PEAK: Final = b"VmHWM:"


class Resident:
    """What the kernel tells of this process, kept open for who asks many times a second: opening takes longer than reading.

    In a fork it would tell of the parent: make another one there.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(_NOW, os.O_RDONLY)
            self._identity = os.fstat(self._file)

    def bytes(self) -> int | None:
        """Return the bytes of this process that are in the host's memory, None where the kernel does not tell."""
        try:
            return None if self._file is None else int(os.pread(self._file, 256, 0).split()[1]) * _PAGE_BYTES
        except (
            OSError,
            ValueError,
            IndexError,
        ):  # a program that closes every file, as a daemon does, closed this one too
            return resident_bytes()

    def end(self) -> None:
        """Close it, unless its number is another file's by now."""
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None and os.path.samestat(os.fstat(file), self._identity):
                os.close(file)


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in the host's memory, None where the kernel does not tell."""
    try:
        return int(_read(_NOW).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """Return the most that this process ever had there, None where the kernel does not tell."""
    try:
        return int(_read("/proc/self/status").partition(_PEAK)[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None


def _read(path: str) -> bytes:
    """Return what the kernel tells in a file of its own, which it gives in one piece."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _PAGE_BYTES)
    finally:
        os.close(file)
