"""Build out-of-memory errors with the wording of each torch version, from ``wordings.toml``."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from oomguard.core.errors import SettingError

NEIGHBOUR_PID: Final = 1234


@dataclass(frozen=True, slots=True)
class Figures:
    """Hold the numbers of a message.

    ``allocated_bytes`` is the memory in tensors. ``reserved_bytes`` is everything that torch holds.
    """

    tried_bytes: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    others_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TorchMessage:
    """Describe one message, the platform and torch versions that print it, and its source file."""

    platform: str
    versions: str
    source: str
    text: str
    neighbour: str = ""
    raises: str = "OutOfMemoryError"
    unit_end: str = "iB"

    def message(self, figures: Figures) -> str:
        """Return the message with these numbers."""
        sizes = {
            "tried": figures.tried_bytes,
            "capacity": figures.capacity_bytes,
            "free": figures.free_bytes,
            "in_use": figures.reserved_bytes,
            "allocated": figures.allocated_bytes,
            "unallocated": figures.reserved_bytes - figures.allocated_bytes,
            "reserved": figures.reserved_bytes,
            "others": figures.others_bytes,
        }
        shown = {name: format_size(size_bytes, self.unit_end) for name, size_bytes in sizes.items()}
        if figures.others_bytes:
            clause = self.neighbour.format(pid=NEIGHBOUR_PID, **shown)
        else:
            clause = ""
        return self.text.format(neighbour=clause, **shown)

    def error(self, figures: Figures) -> Exception:
        """Return the exception that torch raises with this message."""
        message = self.message(figures)
        if self.raises == "RuntimeError":
            return RuntimeError(message)
        import torch

        # torch has no types here
        return torch.OutOfMemoryError(message)  # type: ignore[no-any-return]


@functools.cache
def wordings() -> tuple[TorchMessage, ...]:
    """Return every wording, the newest of each platform first."""
    rows = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8"))[
        "wording"
    ]
    return tuple(TorchMessage(**row) for row in rows)


def find_wording(name: str | None = None) -> TorchMessage:
    """Return the wording for ``"cuda 2.1"``, ``"2.1"`` (CUDA's) or ``"mps"`` (its newest).

    None returns CUDA's newest wording.

    Raises:
        SettingError: the platform and version are unknown.
    """
    if name is None:
        words = ["cuda"]
    elif isinstance(name, str):
        words = name.lower().split()
    else:
        words = []
    platform, version = (words[0], words[1:]) if words and words[0].isalpha() else ("cuda", words)
    for row in wordings():
        if (
            words
            and row.platform == platform
            and all(_holds(row.versions, each) for each in version)
        ):
            return row
    known = ", ".join(f"{row.platform} {row.versions}" for row in wordings())
    raise SettingError(
        f"oomguard knows no torch wording {name!r}",
        hint=f'write it as "cuda 2.1" or "mps"; known: {known}',
    )


def oom_error(
    wording: str | None = None,
    *,
    tried: str | int = "2 GiB",
    capacity: str | int = "8 GiB",
    allocated: str | int | None = None,
    reserved: str | int | None = None,
    other_processes: str | int = 0,
) -> Exception:
    """Return the exception that a torch version raises on a full device, to test your own handler.

    ```python
    error = oomguard.testing.oom_error("cuda 2.1", tried="2 GiB")
    ```

    Args:
        wording: platform and version: ``"cuda 2.1"``, ``"hip"``, ``"mps 2.7"``. None (default):
            CUDA's newest.
        tried: the size of the failed allocation, as text (``"2 GiB"``) or bytes.
        capacity: the size of the device.
        allocated: the memory in tensors. None (default): nearly everything that others leave, so
            that ``tried`` does not fit.
        reserved: the memory that torch holds, including tensors. None (default): the same as
            ``allocated``.
        other_processes: the memory that other processes use.

    Raises:
        SettingError: a size or wording is invalid, or torch and other processes use more than the
            device has.
    """
    row = find_wording(wording)
    asked = read_size(tried)
    total = read_size(capacity)
    others = read_size(other_processes)
    room = max(0, total - others)
    if allocated is None:
        in_tensors = room - min(asked // 2, room // 8)
    else:
        in_tensors = read_size(allocated)
    if reserved is None:
        held = in_tensors
    else:
        held = read_size(reserved)
    if allocated is None:
        in_tensors = min(in_tensors, held)
    if not in_tensors <= held <= total - others:
        raise SettingError(
            f"a device of {format_size(total)} cannot have {format_size(in_tensors)} allocated of "
            f"{format_size(held)} reserved, with {format_size(others)} used by other processes",
            hint=(
                f"other processes leave {format_size(room)}: allocated= must not exceed reserved=, "
                "and reserved= must not exceed that"
            ),
        )
    return row.error(Figures(asked, total, total - others - held, in_tensors, held, others))


def _holds(versions: str, version: str) -> bool:
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


# Parse and format sizes: ``"8 GiB"`` means 2^30 bytes a unit, ``"8 GB"`` means 10^9.


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
