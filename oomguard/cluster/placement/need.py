"""Work out how many devices a command needs, and on which devices its plan fits."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from oomguard.cluster.placement.devices import DeviceSlot, match_devices
from oomguard.cluster.placement.leases import LockFile
from oomguard.core.errors import UsageError
from oomguard.core.facts import format_gib
from oomguard.engines.command import Launch
from oomguard.engines.devices import VisibleDevices, started_words, visible_devices
from oomguard.engines.registry import launcher_of
from oomguard.planning.start import (
    CommandStart,
    StartPlan,
    TargetDevice,
    devices_needed,
    engine_version,
    start_of_command,
)

_HOW = (
    "examples: --gpus auto, --gpus 2 (any two), --gpus 0,1 or --gpus 1, (GPU 1 alone) or --gpus "
    "GPU-UUID,…"
)


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Hold the value of ``--gpus``: a count, a list of devices, or neither for ``auto``."""

    count: int | None = None
    named: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The request as the user writes it."""
        if self.named:
            names = ",".join(self.named)
            is_one_number = len(self.named) == 1 and self.named[0].isdigit()
            return f"{names}," if is_one_number else names
        if self.count is None:
            return "auto"
        return str(self.count)

    def among(
        self,
        places: Sequence[DeviceSlot],
        *,
        hidden: str | None = None,
        meant: Mapping[str, Sequence[DeviceSlot]] | None = None,
    ) -> tuple[DeviceSlot, ...]:
        """Return the devices that the command may use.

        Args:
            places: the available devices.
            hidden: the reason why other devices are hidden, or None.
            meant: the devices that each name meant earlier. A device that has gone since is
                unusable.

        Raises:
            UsageError: a named device is not available, or is named twice.
        """
        if not self.named:
            return tuple(places)
        found: list[DeviceSlot] = []
        for entry in self.named:
            gone = []
            for one in (meant or {}).get(entry, ()):
                gone.append(_gone(one, places))
            named = match_devices(entry, places) or gone
            if not named:
                there = ", ".join(place.shown for place in places) or "none"
                if hidden:
                    why = f"; {hidden}"
                else:
                    why = ""
                raise UsageError(
                    f"--gpus names {entry}, but the devices here are: {there}{why}",
                    hint="oomguard gpus",
                )
            repeated = []
            for place in named:
                if place in found:
                    repeated.append(place)
            if repeated:
                raise UsageError(
                    f"--gpus {self.shown} names a device twice: {entry} is {repeated[0].shown}",
                    hint=_HOW,
                )
            found += named
        return tuple(found)


def _gone(place: DeviceSlot, now: Sequence[DeviceSlot]) -> DeviceSlot:
    """Return a device that has gone, with the reason why it is unusable.

    A GPU that dropped off the bus keeps its number but reports no UUID.
    """
    why = None
    for one in now:
        if one.index == place.index and one.cannot is not None:
            why = one.cannot
            break
    return replace(place, free_bytes=None, cannot=why or "it has gone")


def read_gpus(text: str) -> DeviceRequest:
    """Parse the value of ``--gpus``.

    Raises:
        UsageError: the value is invalid.
    """
    text = text.strip()
    if text == "auto":
        return DeviceRequest()
    if re.fullmatch(r"\d{1,4}", text):
        if int(text) == 0:
            raise UsageError(
                "--gpus 0: a command needs at least one device", hint=f"{_HOW}; GPU 0 alone is 0,"
            )
        return DeviceRequest(int(text))
    entries = [entry.strip() for entry in text.removesuffix(",").split(",")]
    if not all(re.fullmatch(r"\d{1,4}|(?:GPU|MIG)-[\w/-]+", entry) for entry in entries):
        raise UsageError(f"--gpus {text!r} is invalid", hint=_HOW)
    if len(set(entries)) < len(entries):
        raise UsageError(f"--gpus {text} names a device twice", hint=_HOW)
    return DeviceRequest(len(entries), tuple(entries))


@dataclass(slots=True)
class AssignedDevices:
    """Hold the devices of a command, their leases, and the variables that select them."""

    places: tuple[DeviceSlot, ...]
    env: Mapping[str, str]
    locks: Mapping[str, LockFile] = field(default_factory=dict)
    _is_released: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """The lease names of the devices."""
        return frozenset(place.key for place in self.places)

    @property
    def shown(self) -> str:
        """The devices in messages."""
        return ", ".join(place.shown for place in self.places)

    @property
    def holds_all(self) -> bool:
        """Whether all leases are still held."""
        return not self._is_released

    def release(self) -> None:
        """Release the leases."""
        self._is_released = True
        for lock in self.locks.values():
            lock.close()


@dataclass(frozen=True, slots=True)
class DeviceAvailability:
    """Hold the result of one look at the devices.

    Attributes:
        candidates: the devices that the command may use, even if others hold them.
        usable: the devices on which the command would start now, the best first, leased or not.
        leased: for each device that another process leased, the holder as text.
        kept: for each free device that is reserved for an earlier start, the ticket of that start.
        hides: which devices are hidden from the run and why, or None.
    """

    candidates: tuple[DeviceSlot, ...]
    usable: tuple[DeviceSlot, ...]
    leased: Mapping[str, str]
    kept: Collection[str]
    hides: str | None = None

    @property
    def open(self) -> list[DeviceSlot]:
        """The devices that the command can take now."""
        open_slots = []
        for place in self.usable:
            if place.key not in self.leased and place.key not in self.kept:
                open_slots.append(place)
        return open_slots


_OF_ANY: VisibleDevices = VisibleDevices(uuid=False, instance="always", why="")


@dataclass(frozen=True, slots=True)
class Fitness:
    """Say whether a command would start on one device.

    Attributes:
        fits: whether the plan surely fits, or probably fits on an empty device. Without a plan:
            whether the device is empty.
        has_margin: whether the plan still fits if it is wrong by its uncertainty.
        surely_not: whether the plan does not fit even if it is wrong by its uncertainty.
        reason: why it does not fit, or an empty text.
    """

    fits: bool
    has_margin: bool = False
    surely_not: bool = False
    reason: str = ""


@dataclass(slots=True)
class DeviceNeed:
    """Describe what one command needs.

    Attributes:
        devices: the number of devices, or None if the command's flags do not give it.
        engines: the number of engines that the command starts. Each one logs its own start.
        start: the start to plan, or None if the memory is unknown; then ``unknown`` holds the
            reason.
        version: the version of the engine, or None if it was not found.
        visible: the forms of CUDA_VISIBLE_DEVICES that the engine reads.
        tells_start: whether the log shows that all engines have taken their memory. False for a
            program, because it may start another engine later.
    """

    devices: int | None
    engines: int
    start: CommandStart | None
    unknown: str | None
    version: str | None
    visible: VisibleDevices
    tells_start: bool = False
    _found: dict[TargetDevice, Fitness] = field(default_factory=dict)

    def on(self, place: DeviceSlot, *, emptied: bool = False) -> Fitness:
        """Judge a device as it is now, or as it would be empty."""
        if place.total_bytes is None or place.free_bytes is None:
            return Fitness(fits=False, reason=place.room)
        if self.start is None:
            fits = emptied or place.is_empty
            return Fitness(
                fits,
                has_margin=fits,
                reason="" if fits else f"another process uses it: {place.room}",
            )
        is_empty = emptied or place.is_empty
        device = TargetDevice(place.total_bytes, None if is_empty else place.free_bytes, place.name)
        if device not in self._found:
            self._found[device] = _fitness(self.start, device)
        return self._found[device]

    def plan_on(self, place: DeviceSlot) -> StartPlan | None:
        """Return the plan for the empty device, or None if there is nothing to plan with."""
        if self.start is None or place.total_bytes is None:
            return None
        return self.start.plan_on(TargetDevice(place.total_bytes, None, place.name))


def need_of(launch: Launch) -> DeviceNeed:
    """Read what a command needs from its words, its model's files and the installed engine."""
    launcher = launcher_of(launch)
    version = engine_version(launch)
    counted = devices_needed(launch)
    found = start_of_command(launch, version)
    is_engine = launcher.is_own_command(launch.argv)
    # A program may start any engine or none, so use the form that every version reads.
    if is_engine:
        visible = visible_devices(launcher.NAME, version)
    else:
        visible = _OF_ANY
    devices, engines = counted if counted is not None else (None, 1)
    tells = is_engine and devices is not None and started_words(launcher.NAME) is not None
    if isinstance(found, str):
        return DeviceNeed(devices, engines, None, found, version, visible, tells)
    return DeviceNeed(devices, engines, found, None, version, visible, tells)


def _fitness(start: CommandStart, device: TargetDevice) -> Fitness:
    try:
        budget = start.on(device)
    except UsageError as error:  # the engine would refuse these settings on any device
        return Fitness(fits=False, reason=str(error))
    reason = "; ".join(budget.reasons)
    if budget.fit == "unsure" and not reason:
        uncertain = format_gib(budget.uncertainty_bytes)
        reason = f"{format_gib(budget.spare_bytes)} would be to spare, but {uncertain} is uncertain"
    # On an empty device nothing better can be had. Next to another process an unsure start waits.
    is_empty = device.free_bytes is None
    fits = budget.fits
    if budget.fit == "unsure" and is_empty:
        fits = budget.is_expected_to_fit
    return Fitness(fits, budget.fits, budget.fit == "no", "" if fits else reason)
