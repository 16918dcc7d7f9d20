"""How much of the host's memory this process has: now, and at most in its whole life (proc(5): statm, status)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PEAK: Final = re.compile(r"(?m)^VmHWM:\s+(\d+) kB")


def resident_bytes() -> int | None:
    """Return the bytes of this process that are in the host's memory, None where the kernel does not tell."""
    try:
        # Many times a second: open as bytes, without a decoder.
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib takes twice as long
            return int(file.read(128).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def peak_resident_bytes() -> int | None:
    """Return the most that this process ever had there, None where the kernel does not tell."""
    try:
        found = _PEAK.search(Path("/proc/self/status").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return None if found is None else int(found.group(1)) * 1024
