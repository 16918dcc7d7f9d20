"""What this machine's processor can do, as far as an engine's memory depends on it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_TILES: Final = "amx_tile"


@functools.cache
def has_matrix_tiles() -> bool:
    """Return whether it has AMX's tiles (Intel, from 2023): engines choose other kernels there. False where nothing tells."""
    try:
        flags = next(
            line
            for line in _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
            if line.startswith("flags")
        )
    except (OSError, StopIteration):
        return False
    return _TILES in flags.split()
