"""Create a simulated device from checked options, and return the active one, without torch.

torch is imported when the first device is created.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from oomguard.core.errors import SettingError
from oomguard.testing.wordings import TorchMessage, find_wording, format_size, read_size

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


# The devices that tests have entered, the innermost last.
active_devices: Final[list[SimulatedDevice]] = []


def active_device() -> SimulatedDevice | None:
    """Return the innermost active simulated device of this thread.

    A thread without one gets the device that another thread entered last; None without any.
    """
    # Another thread may enter or leave a device meanwhile.
    devices = active_devices.copy()
    this_thread = threading.get_ident()
    # A thread's own device wins over one that another thread entered later.
    for device in reversed(devices):
        if device.thread == this_thread:
            return device
    if devices:
        return devices[-1]
    return None


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """Describe the device that a test asks for.

    ``fail_at`` holds the numbers of allocations that fail even if memory is free.
    """

    capacity_bytes: int
    caching_allocator: bool
    other_processes_bytes: int
    fail_at: Collection[int]
    wording: TorchMessage

    def device(self) -> SimulatedDevice:
        """Return a new device of this kind; this imports torch."""
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
    """Return the device that the options of ``limit_memory`` describe.

    Raises:
        SettingError: an option is invalid.
    """
    capacity = read_size(size)
    others = read_size(other_processes, "size of other processes")
    if capacity <= 0:
        raise SettingError(f"a device of {size} has no memory")
    if others >= capacity:
        raise SettingError(
            f"other processes cannot use {format_size(others)} of a device of "
            f"{format_size(capacity)}",
            hint="leave memory for the test: other_processes below the size of the device",
        )
    numbers = (fail_at,) if isinstance(fail_at, int) else fail_at
    if (
        not isinstance(numbers, Collection)
        or isinstance(numbers, str)
        or any(not _is_count(n) for n in _ends(numbers))
    ):
        raise SettingError(
            f"fail_at={fail_at!r} is not the number of an allocation",
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
    """Simulate a device of this size on the CPU, as a context manager.

    ```python
    with oomguard.testing.limit_memory("8 GiB") as device:
        model.generate(**inputs)
    print(device.peak_bytes)
    ```

    Args:
        size: ``"256 MiB"`` (2^20), ``"8 GB"`` (10^9), or a number of bytes.
        caching_allocator: count the blocks and segments that torch's caching allocator would
            reserve for the tensors. An allocation can then fail because of fragmentation. False
            (default): count the tensors alone.
        other_processes: the memory that other processes use. ``other_processes_bytes`` of the
            device changes it later.
        fail_at: the number of the allocation that fails once even if memory is free, or several
            numbers. Results of operations count from 1.
        wording: the wording of the error: ``"cuda 2.1"``, ``"hip"``, ``"mps 2.7"``. None (default):
            CUDA's newest.

    Raises:
        SettingError: a size is not a positive size, other processes use the whole device, or an
            option is invalid.
    """
    return read_limit(
        size,
        caching_allocator=caching_allocator,
        other_processes=other_processes,
        fail_at=fail_at,
        wording=wording,
    ).device()


def _ends(numbers: Collection[int]) -> Collection[int]:
    """Return the numbers to check; of a range only its ends, because a range may be huge."""
    if isinstance(numbers, range) and numbers:
        return (min(numbers[0], numbers[-1]),)
    return numbers


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
