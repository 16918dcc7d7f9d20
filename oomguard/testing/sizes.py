"""Parse and format sizes: ``"8 GiB"`` means 2^30 bytes a unit, ``"8 GB"`` means 10^9."""

from __future__ import annotations

import math
import re
from typing import Final

from oomguard.core.errors import SettingError

_UNITS: Final = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*\Z")


def read_size(size: str | int, what: str = "size") -> int:
    """Return a size in bytes: ``"256 MiB"`` (2^20), ``"8 GB"`` (10^9) or a number of bytes.

    Raises:
        SettingError: it is invalid, negative, or a text without a unit. The message names ``what``
            it is.
    """
    if isinstance(size, str):
        match = _SIZE.match(size)
        if match:
            factor = _UNITS.get(match[2].lower())
        else:
            factor = None
        if match is not None and not match[2]:
            number = match[1]
            raise SettingError(
                f"not a {what}: {size!r} has no unit",
                hint=f'write "{number} GiB", "{number} MiB" or "{number} B"',
            )
        if match is None or factor is None or not math.isfinite(float(match[1]) * factor):
            raise SettingError(
                f"not a {what}: {size!r}",
                hint='write it as "256 MiB" or "8 GB" (GiB is 2^30, GB 10^9)',
            )
        return round(float(match[1]) * factor)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise SettingError(
            f"not a {what}: {size!r}", hint='write it as "256 MiB", or as a number of bytes'
        )
    return size


def format_size(size_bytes: int, unit_end: str = "iB") -> str:
    """Format a size with two decimals, as c10/util/Exception format_size in torch does."""
    for letter, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {letter}{unit_end}"
    return f"{size_bytes} bytes"
