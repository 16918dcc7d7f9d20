"""The options of a simulated device, read and checked before torch is imported, and the device that
they make.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomguard.core.errors import SettingError
from oomguard.testing.sizes import read_size, written
from oomguard.testing.wordings import TorchMessage, find_wording

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """A device as a test asks for it; ``fail_at`` are the numbers of allocations that fail whatever
    is free.
    """

    capacity_bytes: int
    caching_allocator: bool
    other_processes_bytes: int
    fail_at: Collection[int]
    wording: TorchMessage

    def device(self) -> SimulatedDevice:
        """Return a device of this kind; imports torch."""
        from oomguard.testing.simulated_device import SimulatedDevice

        return SimulatedDevice(
            self.capacity_bytes,
            caching_allocator=self.caching_allocator,
            other_processes_bytes=self.other_processes_bytes,
            fail_at=self.fail_at,
            wording=self.wording,
        )


def read_limit(
    size: str | int,
    *,
    caching_allocator: bool = False,
    other_processes: str | int = 0,
    fail_at: int | Collection[int] = (),
    wording: str | None = None,
) -> DeviceLimit:
    """Return the device that these options of ``limit_memory`` describe.

    Raises SettingError where one of them cannot be.
    """
    capacity = read_size(size)
    others = read_size(other_processes, "size of other processes")
    if capacity <= 0:
        raise SettingError(f"a device of {size} cannot hold anything")
    if others >= capacity:
        raise SettingError(
            f"other processes cannot hold {written(others)} of a device of {written(capacity)}",
            hint="leave some of it for the test: other_processes below the device's size",
        )
    numbers = (fail_at,) if isinstance(fail_at, int) else fail_at
    if (
        not isinstance(numbers, Collection)
        or isinstance(numbers, str)
        or any(not _is_count(n) for n in _ends(numbers))
    ):
        raise SettingError(
            f"not the number of an allocation: fail_at={fail_at!r}",
            hint=(
                "the first allocation is 1: fail_at=3, fail_at=[3, 7] or fail_at=range(5, 1000, 5)"
            ),
        )
    return DeviceLimit(capacity, bool(caching_allocator), others, numbers, find_wording(wording))


def limit_memory(
    size: str | int,
    *,
    caching_allocator: bool = False,
    other_processes: str | int = 0,
    fail_at: int | Collection[int] = (),
    wording: str | None = None,
) -> SimulatedDevice:
    """A context manager that simulates a device of this size on the CPU.

    Args:
        size: ``"256 MiB"`` (2^20), ``"8 GB"`` (10^9), or a number of bytes.
        caching_allocator: count what torch's caching allocator holds for the tensors, in blocks and
            segments, as on a GPU; an allocation then may fail of fragmentation. Without it tensors
            count as they are.
        other_processes: what others hold of the device; ``other_processes_bytes`` of the device
            changes it later.
        fail_at: the number of the allocation that fails once, whatever is free, or several; results
            of operations count from 1.
        wording: the words of the failure, ``"cuda 2.1"``, ``"hip"``, ``"mps 2.7"``; None is CUDA's
            newest.

    Raises:
        SettingError: where a size is not one or not positive, others hold all of the device, or an
            option cannot be.
    """
    return read_limit(
        size,
        caching_allocator=caching_allocator,
        other_processes=other_processes,
        fail_at=fail_at,
        wording=wording,
    ).device()


def _ends(numbers: Collection[int]) -> Collection[int]:
    """What has to be looked at of the numbers: of a range, which may have no end worth walking to,
    its ends.
    """
    if isinstance(numbers, range) and numbers:
        return (min(numbers[0], numbers[-1]),)
    return numbers


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
