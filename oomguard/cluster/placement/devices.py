"""Model the devices that a command can get: whole GPUs and MIG instances.

CUDA_VISIBLE_DEVICES can limit them.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.core.errors import PlacementError, SettingError, UsageError
from oomguard.core.facts import GIB, format_gib
from oomguard.core.records import Record
from oomguard.probe import nvml
from oomguard.probe.nvml import Gpu, Survey

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
# CUDA, Docker's NVIDIA runtime and SLURM each have their own word for no device.
_NONE: Final = frozenset({"", "-1", "none", "void", "NoDevFiles"})
# The driver itself uses some memory of an empty device, at most the larger of these two. 5% would
# be too much: oomguard would mistake a hidden neighbor of 4 GiB for the driver.
_DRIVER_RATIO: Final = 0.01
_DRIVER_BYTES: Final = GIB


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """Describe one GPU, or one MIG instance of a GPU.

    Attributes:
        index: the number of the GPU in PCI bus order, as NVML and nvidia-smi count.
        uuid: the UUID, or None if the driver does not report it.
        name: the name of the GPU or instance.
        total_bytes: the total memory, or None if the driver does not report it.
        free_bytes: the memory that is free now, or None if the driver does not report it.
        used_bytes_by_pid: the memory of each visible process, or None if the driver does not report
            it.
        instance: the number of the instance within the GPU, or None for a whole GPU.
        cannot: the reason why no command can use it, or None if commands can.
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
        """The name of its lease, which is the same for every program on the machine."""
        return self.uuid or f"index-{self.index}"

    @property
    def shown(self) -> str:
        """The name in messages."""
        if self.instance is None:
            return f"GPU {self.index}"
        return f"instance {self.instance} of GPU {self.index}"

    @property
    def is_empty(self) -> bool:
        """Whether no process seems to use its memory."""
        if self.total_bytes is None or self.free_bytes is None or self.used_bytes_by_pid:
            return False
        return self.total_bytes - self.free_bytes <= max(
            _DRIVER_BYTES, _DRIVER_RATIO * self.total_bytes
        )

    @property
    def room(self) -> str:
        """The free and total memory as text."""
        if self.total_bytes is None or self.free_bytes is None:
            return "its memory is unknown"
        return f"{format_gib(self.free_bytes)} of {format_gib(self.total_bytes)} free"


def device_slots(survey: Survey) -> tuple[DeviceSlot, ...]:
    """Return all devices of a machine in PCI bus order, including unusable ones."""
    slots: list[DeviceSlot] = []
    for gpu in survey.gpus:
        slots += _places(gpu)
    return tuple(slots)


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
        yield DeviceSlot(
            own.index, gpu.uuid, own.name, cannot="MIG is on, but the GPU has no instance"
        )
    for part in gpu.instances:
        held = part.used_bytes_by_pid
        number = part.number
        yield DeviceSlot(
            own.index, part.uuid, part.name, part.total_bytes, part.free_bytes, held, number
        )


@dataclass(frozen=True, slots=True)
class DeviceMask:
    """Hold the devices that CUDA_VISIBLE_DEVICES permits.

    Attributes:
        places: the permitted devices.
        hides: which devices are hidden and why, or None if none is hidden.
    """

    places: tuple[DeviceSlot, ...]
    hides: str | None = None


def apply_visible_devices(places: Sequence[DeviceSlot], environ: Mapping[str, str]) -> DeviceMask:
    """Return the devices that CUDA_VISIBLE_DEVICES permits, in its order.

    CUDA ignores all entries after an invalid one. If a device is named twice, CUDA hides all
    devices.

    Args:
        places: all devices of the machine.
        environ: the user's environment variables.

    Raises:
        UsageError: the variable counts the fastest device first and the devices differ, so its
            numbers are ambiguous.
    """
    value = environ.get(VISIBLE)
    if value is None:
        return DeviceMask(tuple(places))
    # Every runtime accepts its own word, so all of them mean no device here.
    if value.strip() in _NONE:
        return DeviceMask((), f"{VISIBLE}={value} hides every device")
    found: list[DeviceSlot] = []
    behind = ""
    for entry in map(str.strip, value.split(",")):
        named = match_devices(entry, places)
        # CUDA does the same: it stops at the first entry that it does not know.
        if not named:
            behind = (
                f"; {entry!r} is not a device here, so CUDA ignores it and all entries after it"
            )
            break
        if any(place in found for place in named):
            return DeviceMask(
                (), f"{VISIBLE}={value} names {named[0].shown} twice, so CUDA shows no device"
            )
        found += named
    # By default CUDA numbers the fastest device first, and NVML counts in PCI order.
    numbers = any(re.fullmatch(r"\d+", text.strip()) for text in value.split(","))
    if numbers and environ.get(ORDER) != BY_BUS and _differ(places):
        raise UsageError(
            f"{VISIBLE}={value} counts the fastest device first, but the devices here differ, so "
            "its numbers are ambiguous",
            hint=(
                f"export {ORDER}={BY_BUS}   # counts as nvidia-smi does; or use UUIDs (oomguard "
                "gpus)"
            ),
        )
    hidden = []
    for place in places:
        if place not in found:
            hidden.append(place.shown)
    if not hidden and not behind:
        return DeviceMask(tuple(found))
    return DeviceMask(
        tuple(found), f"{VISIBLE}={value} hides {', '.join(hidden) or 'nothing'}{behind}"
    )


def _differ(places: Sequence[DeviceSlot]) -> bool:
    """Return whether the machine has GPUs of several models, ignoring GPUs that do not answer."""
    names = set()
    for place in places:
        if place.instance is None and place.name is not None:
            names.add(place.name)
    return len(names) > 1


def match_devices(entry: str, places: Sequence[DeviceSlot]) -> list[DeviceSlot]:
    """Return the devices that one entry names, or an empty list.

    An entry is a number, or the beginning of a UUID that matches only one device.
    """
    if re.fullmatch(r"\d{1,9}", entry):
        by_index = []
        for place in places:
            if place.index == int(entry):
                by_index.append(place)
        return by_index
    begins = []
    for place in places:
        if place.uuid is not None and place.uuid.startswith(entry):
            begins.append(place)
    # CUDA accepts an abbreviated UUID if it is unambiguous.
    if len(begins) == 1 and entry.startswith(("GPU-", "MIG-")):
        return begins
    return []


# Give several programs of one machine disjoint devices with ``oomguard.place``.

_HOW: Final = (
    'give a number of devices or a list of device numbers: {"serve": 4} or {"serve": [0, 1]}'
)


@dataclass(frozen=True, slots=True, repr=False)
class PlacedDevices(Record):
    """Hold the devices of one program.

    ```python
    devices = oomguard.place({"serve": 4})["serve"]
    subprocess.Popen(command, env={**os.environ, **devices.env})
    ```

    Attributes:
        indices: the numbers in PCI bus order, as nvidia-smi counts.
        uuids: the UUIDs. An entry is None if the driver does not report it.
    """

    indices: tuple[int, ...]
    uuids: tuple[str | None, ...]

    @property
    def visible(self) -> str:
        """The value for CUDA_VISIBLE_DEVICES by number, which every engine version reads."""
        return ",".join(map(str, self.indices))

    @property
    def env(self) -> dict[str, str]:
        """The variables that show a program these devices and no others."""
        return {VISIBLE: self.visible, ORDER: BY_BUS}


def place(wanted: Mapping[str, int | Sequence[int]]) -> dict[str, PlacedDevices]:
    """Give each program its own devices.

    ```python
    placed = oomguard.place({"serve": 4, "embed": [4, 5]})
    placed["serve"].env
    ```

    Empty devices come first, then the others. Within each group the order is that of
    CUDA_VISIBLE_DEVICES, or of the PCI bus without it. oomguard does not use devices that
    CUDA_VISIBLE_DEVICES hides. It leases nothing: if other people use this machine too, start the
    programs with ``oomguard run --gpus``.

    Args:
        wanted: for each program name, a number of devices or a list of device numbers.

    Returns:
        The devices of each program, by its name.

    Raises:
        PlacementError: two programs name the same device, there are too few devices, or NVML does
            not answer.
        SettingError: ``wanted`` is not a mapping of programs.
        UsageError: a value is neither a number of devices nor a list of device numbers.
    """
    if not isinstance(wanted, Mapping):
        raise SettingError(
            f"place() needs a mapping from program names to devices, got {wanted!r}", hint=_HOW
        )
    named = {}
    counts = {}
    for name, value in wanted.items():
        if isinstance(value, int):
            counts[name] = _count(name, value)
        else:
            named[name] = _numbers(name, value)
    _refuse_shared(named)
    survey = nvml.survey()
    if survey.failure is not None:
        raise PlacementError(
            f"oomguard cannot place any device: NVML does not answer ({survey.failure})",
            hint="oomguard gpus",
        )
    limit = apply_visible_devices(device_slots(survey), os.environ)
    usable = {}
    for place in limit.places:
        if place.cannot is None and place.instance is None:
            usable[place.index] = place
    if limit.hides:
        hidden = f"; {limit.hides}"
    else:
        hidden = ""
    for name, numbers in named.items():
        absent = []
        for number in numbers:
            if number not in usable:
                absent.append(number)
        if absent:
            raise PlacementError(
                f"{name!r} names device {absent[0]}, but {_there(usable)}{hidden}",
                hint="oomguard gpus",
            )
    taken = set(itertools.chain.from_iterable(named.values()))
    free = []
    for index, place in usable.items():
        if index not in taken:
            free.append(place)
    left = sorted(free, key=lambda p: not p.is_empty)
    order = list(usable)
    if (lacking := sum(counts.values()) - len(left)) > 0:
        raise _too_few(counts, named, left, usable, hidden, lacking)
    found = {}
    for name, numbers in named.items():
        found[name] = tuple(usable[number] for number in numbers)
    for name, count in counts.items():
        found[name], left = (
            tuple(sorted(left[:count], key=lambda place: order.index(place.index))),
            left[count:],
        )
    return {name: _placed(found[name]) for name in wanted}


def _placed(places: Sequence[DeviceSlot]) -> PlacedDevices:
    return PlacedDevices(
        tuple(place.index for place in places), tuple(place.uuid for place in places)
    )


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise UsageError(
            f"{name!r} wants {value!r} devices",
            hint=_HOW,
        )
    return value


def _numbers(name: str, value: Sequence[int]) -> tuple[int, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if (
        not is_list
        or not value
        or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value)
    ):
        raise UsageError(f"{name!r} wants {value!r}", hint=_HOW)
    if len(set(value)) < len(value):
        raise UsageError(f"{name!r} names a device twice: {list(value)}")
    return tuple(value)


def _refuse_shared(named: Mapping[str, Sequence[int]]) -> None:
    """Raise PlacementError if two programs name the same device."""
    owners: dict[int, str] = {}
    for name, numbers in named.items():
        listed = ",".join(map(str, numbers))
        for number in numbers:
            if (other := owners.setdefault(number, name)) != name:
                raise PlacementError(
                    f"{other!r} and {name!r} both name device {number}, so each would take memory "
                    "that the other needs",
                    hint=(
                        "remove the device from one of them, or run them one after the other: "
                        f"oomguard run --gpus {listed}, --wait 1h -- …"
                    ),
                )


def _too_few(
    counts: Mapping[str, int],
    named: Mapping[str, Sequence[int]],
    left: Sequence[DeviceSlot],
    usable: Mapping[int, DeviceSlot],
    hidden: str,
    lacking: int,
) -> PlacementError:
    wanted = [f"{name!r} wants {count}" for name, count in counts.items()]
    wanted += [f"{name!r} has {', '.join(map(str, numbers))}" for name, numbers in named.items()]
    most = max(counts.values())
    if most <= len(left):
        turns = (
            f"; with {len(left)} left, run them one after the other: oomguard run --gpus {most} "
            "--wait 1h -- …"
        )
    else:
        turns = ""
    return PlacementError(
        f"{lacking} too few: {', '.join(wanted)}, but {_there(usable)}{hidden}",
        hint=f"ask for fewer{turns}",
    )


def _there(usable: Mapping[int, DeviceSlot]) -> str:
    numbers = ", ".join(map(str, sorted(usable)))
    if len(usable) != 1:
        return f"there are {len(usable)} ({numbers})"
    return f"there is 1 ({numbers})"
