"""What a command needs of devices: how many, and on which its plan fits."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from oomguard.cluster.placement.devices import DeviceSlot, named_by
from oomguard.cluster.placement.leases import Lock
from oomguard.core.errors import UsageError
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

# What ``--gpus`` asks for: as many as the command needs, a number of them, or these.

_HOW = "--gpus auto, a number such as 2, or a list: 0,1 or 1, (GPU 1 alone) or GPU-UUID,…"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """``count`` devices, or the ``named`` ones; as many as the command needs where it
    is neither.
    """

    count: int | None = None
    named: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """How it is written."""
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
        """Return the places that may be taken: those named, else all.

        Args:
            places: those that are there.
            hidden: what hides others, in words.
            meant: what each name meant when it was there; one that is there no longer cannot be
                used.

        Raises:
            UsageError: one that is named is not among them, or is named twice.
        """
        if not self.named:
            return tuple(places)
        found: list[DeviceSlot] = []
        for entry in self.named:
            named = named_by(entry, places) or [
                _gone(one, places) for one in (meant or {}).get(entry, ())
            ]
            if not named:
                there = ", ".join(place.shown for place in places) or "none"
                if hidden:
                    why = f"; {hidden}"
                else:
                    why = ""
                raise UsageError(
                    f"--gpus names {entry}, which is not among the devices here ({there}{why})",
                    hint="oomguard gpus",
                )
            if again := [place for place in named if place in found]:
                raise UsageError(
                    f"--gpus {self.shown}: a device is named twice: {entry} is {again[0].shown}",
                    hint=_HOW,
                )
            found += named
        return tuple(found)


def _gone(place: DeviceSlot, now: Sequence[DeviceSlot]) -> DeviceSlot:
    """Return a place that was there, with why it is not any more: a GPU that fell off keeps its
    number, and tells no UUID.
    """
    why = next(
        (one.cannot for one in now if one.index == place.index and one.cannot is not None), None
    )
    return replace(place, free_bytes=None, cannot=why or "it is not there any more")


def read_gpus(text: str) -> DeviceRequest:
    """Read the value of ``--gpus``.

    Raises:
        UsageError: it is none.
    """
    text = text.strip()
    if text == "auto":
        return DeviceRequest()
    if re.fullmatch(r"\d{1,4}", text):
        if int(text) == 0:
            raise UsageError(
                "--gpus 0: a command needs one device at least", hint=f"{_HOW}; GPU 0 alone is 0,"
            )
        return DeviceRequest(int(text))
    entries = [entry.strip() for entry in text.removesuffix(",").split(",")]
    if not all(re.fullmatch(r"\d{1,4}|(?:GPU|MIG)-[\w/-]+", entry) for entry in entries):
        raise UsageError(f"--gpus {text!r}: not understood", hint=_HOW)
    if len(set(entries)) < len(entries):
        raise UsageError(f"--gpus {text}: a device is named twice", hint=_HOW)
    return DeviceRequest(len(entries), tuple(entries))


# What one look at the devices found, and what a command was given of them.


@dataclass(slots=True)
class Taken:
    """Places that a command has, with their leases, and the variables under which it sees them and
    no others.
    """

    places: tuple[DeviceSlot, ...]
    env: Mapping[str, str]
    locks: Mapping[str, Lock] = field(default_factory=dict)
    _is_released: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """What they are leased under."""
        return frozenset(place.key for place in self.places)

    @property
    def shown(self) -> str:
        """How a person is told of them."""
        return ", ".join(place.shown for place in self.places)

    @property
    def holds_all(self) -> bool:
        """Whether its leases are held still, as far as there are any."""
        return not self._is_released

    def release(self) -> None:
        """Give the leases back."""
        self._is_released = True
        for lock in self.locks.values():
            lock.close()


@dataclass(frozen=True, slots=True)
class Now:
    """What one look found.

    Attributes:
        candidates: the places that may be taken, whoever has them.
        usable: those on which the command would start now, leased or not, the best first.
        leased: which of all places somebody else has, with who that is in words.
        kept: which free ones are kept for who came before.
        hides: what is hidden from the run, in words; None where nothing is.
    """

    candidates: tuple[DeviceSlot, ...]
    usable: tuple[DeviceSlot, ...]
    leased: Mapping[str, str]
    kept: Collection[str]
    hides: str | None = None

    @property
    def open(self) -> list[DeviceSlot]:
        """The places that can be taken now."""
        return [
            place
            for place in self.usable
            if place.key not in self.leased and place.key not in self.kept
        ]


_OF_ANY: VisibleDevices = VisibleDevices(uuid=False, instance="always", why="")


@dataclass(frozen=True, slots=True)
class Fitness:
    """Whether a command would start on one place.

    Attributes:
        fits: whether its plan fits there; where nothing is known of the command, whether nobody
            uses the place.
        has_margin: whether it still fits where the plan is off by its uncertainty.
        surely_not: whether it would not even then.
        reason: why it does not fit, empty where it does.
    """

    fits: bool
    has_margin: bool = False
    surely_not: bool = False
    reason: str = ""


@dataclass(slots=True)
class DeviceNeed:
    """What one command needs.

    Attributes:
        devices: how many; None where its own flags do not say.
        engines: how many engines it starts on them, each of which tells of its own start.
        start: its start to budget; None where its memory is not known, and ``unknown`` says why.
        version: its engine's, None where it is not found.
        visible: what it reads in CUDA_VISIBLE_DEVICES.
        tells_start: whether its log tells when all its engines have taken their memory. A program's
            does not: it may start one more.
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
        """Return whether the command would start on a place as it is now, or as it is once nobody
        uses it.
        """
        if place.total_bytes is None or place.free_bytes is None:
            return Fitness(fits=False, reason=place.room)
        if self.start is None:
            fits = emptied or place.is_empty
            return Fitness(
                fits, has_margin=fits, reason="" if fits else f"somebody uses it: {place.room}"
            )
        is_empty = emptied or place.is_empty
        device = TargetDevice(place.total_bytes, None if is_empty else place.free_bytes, place.name)
        if device not in self._found:
            self._found[device] = _fitness(self.start, device)
        return self._found[device]

    def plan_on(self, place: DeviceSlot) -> StartPlan | None:
        """Return the plan for a place once nobody uses it; None where there is nothing to plan
        with.
        """
        if self.start is None or place.total_bytes is None:
            return None
        return self.start.plan_on(TargetDevice(place.total_bytes, None, place.name))


def need_of(launch: Launch) -> DeviceNeed:
    """Read what a command needs from its own words, its model's files and the engine that is
    installed.
    """
    launcher = launcher_of(launch)
    version = engine_version(launch)
    counted = devices_needed(launch)
    found = start_of_command(launch, version)
    is_engine = launcher.is_own_command(launch.argv)
    # A program may start any engine, or none: what every version reads does for it.
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
    except UsageError as error:  # the engine would refuse the settings, whatever the device
        return Fitness(fits=False, reason=str(error))
    lacks_free = (
        budget.requested_bytes > device.total_bytes - budget.not_free_bytes
    )  # of that nothing is uncertain
    surely_not = not budget.fits and (
        lacks_free or budget.margin_bytes + budget.uncertainty_bytes < 0
    )
    return Fitness(budget.fits, budget.has_margin, surely_not, "; ".join(budget.reasons))
