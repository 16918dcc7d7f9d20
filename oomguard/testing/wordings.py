"""The words of a full device in each version of torch, from ``wordings.toml``; filled with figures,
an exception of its type.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from oomguard.core.errors import SettingError
from oomguard.testing.sizes import read_size, written

NEIGHBOUR_PID: Final = 1234


@dataclass(frozen=True, slots=True)
class Figures:
    """What a message tells: ``allocated_bytes`` is in tensors, ``reserved_bytes`` what torch holds
    for them and beside them.
    """

    tried_bytes: int
    capacity_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    others_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TorchMessage:
    """One message: ``platform`` and ``versions`` of torch that print it, and where it stands in
    torch.
    """

    platform: str
    versions: str
    source: str
    text: str
    neighbour: str = ""
    raises: str = "OutOfMemoryError"
    unit_end: str = "iB"

    def message(self, figures: Figures) -> str:
        """Return the message with these figures."""
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
        shown = {name: written(size_bytes, self.unit_end) for name, size_bytes in sizes.items()}
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

        # torch is not typed here
        return torch.OutOfMemoryError(message)  # type: ignore[no-any-return]


@functools.cache
def wordings() -> tuple[TorchMessage, ...]:
    """Return every wording, the newest of each platform first."""
    rows = tomllib.loads((Path(__file__).parent / "wordings.toml").read_text(encoding="utf-8"))[
        "wording"
    ]
    return tuple(TorchMessage(**row) for row in rows)


def find_wording(name: str | None = None) -> TorchMessage:
    """Return the wording of ``"cuda 2.1"``, of ``"2.1"`` (CUDA's) or of ``"mps"`` (the newest);
    None is the newest of CUDA.

    Raises SettingError where no wording of that platform and version is known.
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
        f"no wording of torch is known as {name!r}",
        hint=f'write it as "cuda 2.1" or "mps"; known are {known}',
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
    """Return the exception that a version of torch raises on a full device, to raise in a test of
    your own handler.

    Args:
        wording: platform and version, ``"cuda 2.1"``, ``"hip"``, ``"mps 2.7"``; None is CUDA's
            newest.
        tried: what the failed allocation asked for; sizes are text (``"2 GiB"``) or bytes.
        capacity: the device's size.
        allocated: what tensors hold; None is nearly all that others leave of the device, so that
            ``tried`` does not fit.
        reserved: what torch holds, tensors included; None is as much as ``allocated``.
        other_processes: what others hold of the device.

    Raises:
        SettingError: where a size or a wording is none, or torch and others hold more than the
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
            f"a device of {written(total)} cannot have {written(in_tensors)} allocated of "
            f"{written(held)} reserved, "
            f"and {written(others)} held by others",
            hint=(
                f"others leave {written(room)}: allocated= is at most reserved=, and reserved= at "
                "most that"
            ),
        )
    return row.error(Figures(asked, total, total - others - held, in_tensors, held, others))


def _holds(versions: str, version: str) -> bool:
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
