"""How much of the host's memory this process has: now, and at most in its whole life (proc(5): statm, status)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PEAK: Final = b"VmHWM:"


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in the host's memory, None where the kernel does not tell."""
    try:
        return int(_reader()(b"/proc/self/statm", 256).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """Return the most that this process ever had there, None where the kernel does not tell."""
    try:
        return int(_reader()(b"/proc/self/status", _PAGE_BYTES).partition(_PEAK)[2].split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def _reader() -> Callable[[bytes, int], bytes]:
    """Return what reads a small file of the kernel's, which it gives in one piece, without letting go of the interpreter's lock.

    ``os.open``, ``os.read`` and ``os.close`` let go of it, one after the other: a thread that samples beside a model's work then
    has to take it from that work three times more a sample, and each time one of them sleeps until the system wakes it.
    """
    import ctypes

    libc = ctypes.PyDLL(None)
    libc.read.restype, libc.read.argtypes = ctypes.c_ssize_t, (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    opened, read, close = libc.open, libc.read, libc.close
    make_buffer, flags = ctypes.create_string_buffer, os.O_RDONLY | os.O_CLOEXEC

    def content(path: bytes, most_bytes: int) -> bytes:
        file = opened(path, flags)
        if file < 0:
            raise FileNotFoundError(path)
        buffer = make_buffer(most_bytes)
        count = read(file, buffer, most_bytes)
        close(file)
        return buffer.raw[: max(0, count)]

    return content
