"""What this machine's processor can do, as far as an engine's memory depends on it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_TILES: Final = "amx_tile"
_HALF_PRODUCTS: Final = "avx512_bf16"


def has_matrix_tiles() -> bool:
    """Return whether it has AMX's tiles (Intel, from 2023): engines choose other kernels there. False where nothing tells."""
    return _TILES in _flags()


def multiplies_in_bfloat16() -> bool:
    """Return whether it multiplies bfloat16 in AVX-512 (Intel from 2020, AMD from 2022). False where nothing tells."""
    return _HALF_PRODUCTS in _flags()


@functools.cache
def _flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
