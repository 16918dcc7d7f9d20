"""How much of the host's memory this process has: now, and at most in its whole life (proc(5): statm, status)."""

from __future__ import annotations

import os
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PEAK: Final = b"VmHWM:"


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in the host's memory, None where the kernel does not tell."""
    try:
        return int(_read("/proc/self/statm").split()[1]) * _PAGE_BYTES
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
    # At each edge of each call that is watched, when the caches hold the model's work: a file object takes half as long again.
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, _PAGE_BYTES)
    finally:
        os.close(file)
