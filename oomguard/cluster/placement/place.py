"""Give several programs of one machine disjoint devices with ``oomguard.place``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oomguard.cluster.placement.devices import (
    BY_BUS,
    ORDER,
    VISIBLE,
    DeviceSlot,
    apply_visible_devices,
    device_slots,
)
from oomguard.core.errors import PlacementError, SettingError, UsageError
from oomguard.core.records import Record
from oomguard.probe import nvml

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
    named = {
        name: _numbers(name, value) for name, value in wanted.items() if not isinstance(value, int)
    }
    counts = {name: _count(name, value) for name, value in wanted.items() if isinstance(value, int)}
    _refuse_shared(named)
    survey = nvml.survey()
    if survey.failure is not None:
        raise PlacementError(
            f"oomguard cannot place any device: NVML does not answer ({survey.failure})",
            hint="oomguard gpus",
        )
    limit = apply_visible_devices(device_slots(survey), os.environ)
    usable = {
        place.index: place
        for place in limit.places
        if place.cannot is None and place.instance is None
    }
    if limit.hides:
        hidden = f"; {limit.hides}"
    else:
        hidden = ""
    for name, numbers in named.items():
        if missing := [number for number in numbers if number not in usable]:
            raise PlacementError(
                f"{name!r} names device {missing[0]}, but {_there(usable)}{hidden}",
                hint="oomguard gpus",
            )
    taken = set(itertools.chain.from_iterable(named.values()))
    left = sorted(
        (place for index, place in usable.items() if index not in taken),
        key=lambda p: not p.is_empty,
    )
    order = list(usable)
    if (lacking := sum(counts.values()) - len(left)) > 0:
        raise _too_few(counts, named, left, usable, hidden, lacking)
    found = {name: tuple(usable[number] for number in numbers) for name, numbers in named.items()}
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
