"""What a command needs of devices: how many, and on which its plan fits."""

from __future__ import annotations

from dataclasses import dataclass, field

from oomguard.budgeting.of_command import (
    CommandStart,
    DeviceMemory,
    devices_needed,
    engine_version,
    start_of_command,
)
from oomguard.budgeting.start import StartPlan
from oomguard.engines.command import Launch
from oomguard.engines.known import launcher_of
from oomguard.engines.placement import VisibleDevices, started_words, visible_devices
from oomguard.errors import UsageError
from oomguard.placement.places import Place

_OF_ANY: VisibleDevices = VisibleDevices(uuid=False, instance="always", why="")


@dataclass(frozen=True, slots=True)
class Fitness:
    """Whether a command would start on one place.

    Attributes:
        fits: whether its plan fits there; where nothing is known of the command, whether nobody uses the place.
        has_margin: whether it still fits where the plan is off by its uncertainty.
        surely_not: whether it would not even then.
        reason: why it does not fit, empty where it does.
    """

    fits: bool
    has_margin: bool = False
    surely_not: bool = False
    reason: str = ""


@dataclass(slots=True)
class Need:
    """What one command needs.

    Attributes:
        devices: how many; None where its own flags do not say.
        engines: how many engines it starts on them, each of which tells of its own start.
        start: its start to budget; None where its memory is not known, and ``unknown`` says why.
        version: its engine's, None where it is not found.
        visible: what it reads in CUDA_VISIBLE_DEVICES.
        tells_start: whether its log tells when all its engines have taken their memory. A program's does not: it may start one more.
    """

    devices: int | None
    engines: int
    start: CommandStart | None
    unknown: str | None
    version: str | None
    visible: VisibleDevices
    tells_start: bool = False
    _found: dict[DeviceMemory, Fitness] = field(default_factory=dict)

    def on(self, place: Place, *, emptied: bool = False) -> Fitness:
        """Return whether the command would start on a place as it is now, or as it is once nobody uses it."""
        if place.total_bytes is None or place.free_bytes is None:
            return Fitness(fits=False, reason=place.room)
        if self.start is None:
            fits = emptied or place.is_empty
            return Fitness(fits, has_margin=fits, reason="" if fits else f"somebody uses it: {place.room}")
        is_empty = emptied or place.is_empty
        device = DeviceMemory(place.total_bytes, None if is_empty else place.free_bytes, place.name)
        if device not in self._found:
            self._found[device] = _fitness(self.start, device)
        return self._found[device]

    def plan_on(self, place: Place) -> StartPlan | None:
        """Return the plan for a place once nobody uses it; None where there is nothing to plan with."""
        if self.start is None or place.total_bytes is None:
            return None
        return self.start.plan_on(DeviceMemory(place.total_bytes, None, place.name))


def need_of(launch: Launch) -> Need:
    """Read what a command needs from its own words, its model's files and the engine that is installed."""
    launcher, version, counted = launcher_of(launch), engine_version(launch), devices_needed(launch)
    found = start_of_command(launch, version)
    is_engine = launcher.is_own_command(launch.argv)
    # A program may start any engine, or none: what every version reads does for it.
    visible = visible_devices(launcher.NAME, version) if is_engine else _OF_ANY
    devices, engines = counted if counted is not None else (None, 1)
    tells = is_engine and devices is not None and started_words(launcher.NAME) is not None
    if isinstance(found, str):
        return Need(devices, engines, None, found, version, visible, tells)
    return Need(devices, engines, found, None, version, visible, tells)


def _fitness(start: CommandStart, device: DeviceMemory) -> Fitness:
    try:
        budget = start.on(device)
    except UsageError as error:  # the engine would refuse the settings, whatever the device
        return Fitness(fits=False, reason=str(error))
    lacks_free = budget.requested_bytes > device.total_bytes - budget.not_free_bytes  # of that nothing is uncertain
    surely_not = not budget.fits and (lacks_free or budget.margin_bytes + budget.uncertainty_bytes < 0)
    return Fitness(budget.fits, budget.has_margin, surely_not, "; ".join(budget.reasons))
