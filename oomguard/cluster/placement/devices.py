"""What a command can be given: a GPU, or one instance of a GPU that is divided, and what
CUDA_VISIBLE_DEVICES leaves of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.core.errors import UsageError
from oomguard.core.facts import GIB, format_gib
from oomguard.probe.nvml import Gpu, Survey

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
_NONE: Final = frozenset({"", "-1", "none", "void", "NoDevFiles"})
# What no process owns of an empty device is the driver's own: less than the larger of the two. A
# share of 5 % would take a neighbour of 4 GiB that a container hides for the driver.
_DRIVER_RATIO: Final = 0.01
_DRIVER_BYTES: Final = GIB


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """One GPU, or one instance of one.

    Attributes:
        index: of the GPU, in the order of the bus, as NVML and nvidia-smi count.
        uuid: None where the driver does not tell it.
        name: of the GPU or the instance.
        total_bytes: None where the driver does not tell it, as the next two.
        free_bytes: now.
        used_bytes_by_pid: by whom the rest is held, as far as it can be seen.
        instance: its number within the GPU, None for a whole GPU.
        cannot: why no command can be given it; None where one can.
    """

    index: int
    uuid: str | None
    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes_by_pid: Mapping[int, int | None] | None = None
    instance: int | None = None
    cannot: str | None = None

    @property
    def key(self) -> str:
        """What it is leased under: the same for every program on the machine."""
        return self.uuid or f"index-{self.index}"

    @property
    def shown(self) -> str:
        """How a person is told of it."""
        if self.instance is None:
            return f"GPU {self.index}"
        return f"instance {self.instance} of GPU {self.index}"

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds memory of it, as far as can be told."""
        if self.total_bytes is None or self.free_bytes is None or self.used_bytes_by_pid:
            return False
        return self.total_bytes - self.free_bytes <= max(
            _DRIVER_BYTES, _DRIVER_RATIO * self.total_bytes
        )

    @property
    def room(self) -> str:
        """Its memory in words."""
        if self.total_bytes is None or self.free_bytes is None:
            return "its memory is not told"
        return f"{format_gib(self.free_bytes)} of {format_gib(self.total_bytes)} free"


def places_of(survey: Survey) -> tuple[DeviceSlot, ...]:
    """Return all places of a machine, in the order of the bus, those included that
    cannot be used.
    """
    return tuple(place for gpu in survey.gpus for place in _places(gpu))


def _places(gpu: Gpu) -> Iterator[DeviceSlot]:
    own = gpu.device
    if gpu.failure is not None:
        yield DeviceSlot(own.index, gpu.uuid, own.name, cannot=f"it does not answer: {gpu.failure}")
        return
    whole = DeviceSlot(
        own.index, gpu.uuid, own.name, own.total_bytes, own.free_bytes, own.used_bytes_by_pid
    )
    if not gpu.is_divided:
        yield whole
    elif not gpu.instances:
        yield DeviceSlot(own.index, gpu.uuid, own.name, cannot="MIG is on, and it has no instance")
    for part in gpu.instances:
        held = part.used_bytes_by_pid
        number = part.number
        yield DeviceSlot(
            own.index, part.uuid, part.name, part.total_bytes, part.free_bytes, held, number
        )


@dataclass(frozen=True, slots=True)
class DeviceMask:
    """What CUDA_VISIBLE_DEVICES leaves; ``hides`` says what it hides and why, None where it hides
    nothing.
    """

    places: tuple[DeviceSlot, ...]
    hides: str | None = None


def limited(places: Sequence[DeviceSlot], environ: Mapping[str, str]) -> DeviceMask:
    """Return the places that the user's CUDA_VISIBLE_DEVICES permits, in its order.

    As CUDA reads it: what stands behind a wrong entry is hidden, and one that is named twice hides
    all.

    Raises:
        UsageError: it counts the fastest device first, and devices differ, so that nobody can tell
            which one it means.
    """
    value = environ.get(VISIBLE)
    if value is None:
        return DeviceMask(tuple(places))
    if value.strip() in _NONE:
        return DeviceMask((), f"{VISIBLE}={value} hides every device")
    found: list[DeviceSlot] = []
    behind = ""
    for entry in (text.strip() for text in value.split(",")):
        named = named_by(entry, places)
        if not named:
            behind = f", and {entry!r} is none: what stands behind it is hidden too"
            break
        if any(place in found for place in named):
            return DeviceMask(
                (), f"{VISIBLE}={value} names {named[0].shown} twice, and then none is visible"
            )
        found += named
    numbers = any(re.fullmatch(r"\d+", text.strip()) for text in value.split(","))
    if numbers and environ.get(ORDER) != BY_BUS and _differ(places):
        raise UsageError(
            f"{VISIBLE}={value} counts the fastest device first, and the devices here differ: "
            "which one is meant cannot be told",
            hint=(
                f"export {ORDER}={BY_BUS}   # to count as nvidia-smi does; or name devices by UUID "
                "(oomguard gpus)"
            ),
        )
    hidden = [place.shown for place in places if place not in found]
    if not hidden and not behind:
        return DeviceMask(tuple(found))
    return DeviceMask(
        tuple(found), f"{VISIBLE}={value} hides {', '.join(hidden) or 'nothing'}{behind}"
    )


def _differ(places: Sequence[DeviceSlot]) -> bool:
    """Return whether the GPUs are of several kinds; one that does not answer tells no kind."""
    return (
        len({place.name for place in places if place.instance is None and place.name is not None})
        > 1
    )


def named_by(entry: str, places: Sequence[DeviceSlot]) -> list[DeviceSlot]:
    """Return the places that one entry names: a number, or the beginning of a UUID that no other
    has; empty without one.
    """
    if re.fullmatch(r"\d{1,9}", entry):
        return [place for place in places if place.index == int(entry)]
    begins = [place for place in places if place.uuid is not None and place.uuid.startswith(entry)]
    if len(begins) == 1 and entry.startswith(("GPU-", "MIG-")):
        return begins
    return []
