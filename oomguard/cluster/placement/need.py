"""Work out which devices a command needs, and explain why it gets none."""

from __future__ import annotations

import contextlib
import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from oomguard.cluster.placement.devices import DeviceSlot, match_devices
from oomguard.cluster.placement.leases import Lease, LockFile
from oomguard.core.errors import PlacementError, UsageError
from oomguard.core.facts import format_gib
from oomguard.engines.command import Launch
from oomguard.engines.devices import VisibleDevices, started_words, visible_devices
from oomguard.engines.registry import launcher_of
from oomguard.estimate.start.start import StartBudget
from oomguard.planning.start import (
    CommandStart,
    Needed,
    StartPlan,
    TargetDevice,
    devices_needed,
    engine_version,
    start_of_command,
)

# Work out how many devices a command needs, and on which devices its plan fits.

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


# A device's number, or the UUID of a GPU or of one of its MIG instances.
_ENTRY: Final = re.compile(r"\d{1,4}|(?:GPU|MIG)-[\w/-]+")


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
    entries = list(map(str.strip, text.removesuffix(",").split(",")))
    if not all(map(_ENTRY.fullmatch, entries)):
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


# Explain why a command gets no device, with numbers and a line to paste.


@dataclass(frozen=True, slots=True)
class Invocation:
    """Hold one call of ``oomguard run``, so that messages can show it with changes.

    Attributes:
        gpus: the value of ``--gpus``, from a flag, a variable or a file.
        command: the user's command, masked and quoted for a shell.
        options: the words before ``--``.
    """

    gpus: str
    command: str
    options: tuple[str, ...] = ()

    def line(
        self, *, gpus: str | None = None, command: str | None = None, wait: str | None = None
    ) -> str:
        """Return the call as a line to paste, with some values replaced; None keeps a value."""
        words = _with_value(self.options, "--gpus", self.gpus if gpus is None else gpus)
        if wait is not None:
            words = _with_value(words, "--wait", wait, behind="--gpus")
        return (
            f"{shlex.join(['oomguard', 'run', *words])} -- "
            f"{self.command if command is None else command}"
        )


def _with_value(
    words: Sequence[str], name: str, value: str, *, behind: str | None = None
) -> tuple[str, ...]:
    """Return options in which one option has exactly one value.

    The option keeps its first position. A new option goes first, or after the option ``behind``.
    """
    kept: list[str] = []
    at: int | None = None
    left = iter(words)
    for word in left:
        if word == name or word.startswith(f"{name}="):
            if at is None:
                at = len(kept)
            if word == name:
                next(left, None)
        else:
            kept.append(word)
    if at is None:
        at = next(_ends(kept, behind), 0)
    return (*kept[:at], name, value, *kept[at:])


def _ends(words: Sequence[str], name: str | None) -> Iterator[int]:
    return (i + 2 for i, word in enumerate(words) if word == name)


_HOUR_S = 3600


def check_device(place: DeviceSlot, need: DeviceNeed, count: int, gpus: int) -> DeviceSlot:
    """Return a device, with the reason if this command cannot use it.

    Args:
        place: the device.
        need: what the command needs.
        count: the number of devices that the command gets.
        gpus: the number of GPUs in the machine.
    """
    if place.cannot is not None or place.instance is None:
        return place
    if place.uuid is None:
        return replace(
            place, cannot="the driver does not report its UUID, and an instance has no other name"
        )
    if count > 1:
        return replace(
            place,
            cannot=(
                "CUDA shows a program only one MIG instance, but the command needs several devices"
            ),
        )
    if not need.visible.takes_instance(place.instance, gpus):
        return replace(
            place, cannot=f"{_engine(need)} does not start on an instance (MIG): {need.visible.why}"
        )
    return place


def too_few_asked(
    asked: DeviceRequest, need: DeviceNeed, count: int, own: Invocation
) -> UsageError:
    """Return the error for a command that needs more devices than ``--gpus`` gives."""
    if not asked.named:
        given = f"{count} of them"
    else:
        given = ",".join(asked.named)
    return UsageError(
        f"the command's own flags need {need.devices} devices, but --gpus gives {given}",
        hint=own.line(gpus="auto"),
    )


def fits_nowhere(
    need: DeviceNeed,
    candidates: Sequence[DeviceSlot],
    count: int,
    hides: str | None,
    asked: DeviceRequest,
    own: Invocation,
) -> PlacementError:
    """Return the error for a command that would not start on any device, even an empty one."""
    usable = []
    for place in candidates:
        if place.cannot is None:
            usable.append(place)
    if hides:
        hidden = f" ({hides})"
    else:
        hidden = ""
    if len(usable) < count:
        why = ""
        for place in candidates:
            if place.cannot is not None:
                why += f"; {place.shown}: {place.cannot}"
        return PlacementError(
            f"{_devices(count)} needed, but only {len(usable)} can be used{hidden}{why}",
            hint=_over_fewer(need, usable, own),
        )
    # If the command does not fit on the largest device, it fits on none.
    largest = max(usable, key=lambda place: place.total_bytes or 0)
    reason = need.on(largest, emptied=True).reason
    plan = need.plan_on(largest)
    if plan is None or need.start is None:
        return PlacementError(
            f"no device is suitable{hidden}: {largest.shown}: {reason}", hint="oomguard gpus"
        )
    takes = (
        f"it needs at least {_least(plan.budget)} of "
        f"{'a device' if count == 1 else f'each of {count} devices'}"
    )
    largest_of = f"the largest{' that --gpus names' if asked.named else ''}"
    has = f"{largest.shown}, {largest_of}, has {format_gib(largest.total_bytes or 0)}"
    what = f"the command fits on no device{hidden}: {takes}, but {has}: {reason}"
    # The command with these changes fits, so it is the line to paste.
    if plan.changes:
        return PlacementError(what, hint=own.line(command=need.start.changed(plan)))
    return PlacementError(what, hint=_otherwise(need.start, plan.needed, largest, len(usable), own))


def _least(budget: StartBudget) -> str:
    """Return the memory of the fullest device with the smallest sufficient KV cache."""
    # The stage with most memory decides, because every stage has a device of its own.
    sizes = []
    for stage in budget.stages:
        sizes.append(stage.used_bytes - max(0, stage.pool_bytes) + stage.needed_bytes)
    return format_gib(max(sizes))


def _otherwise(
    start: CommandStart, needed: Needed | None, largest: DeviceSlot, usable: int, own: Invocation
) -> str:
    """Return what would help if no setting does: more devices, or a larger one."""
    if needed is None:
        return "oomguard found no change that helps"
    ranks = needed.tensor_parallel_size
    texts = []
    if ranks is not None and ranks <= usable:
        return own.line(gpus="auto", command=start.changed(start.over(ranks, _memory(largest))))
    if ranks is not None:
        texts.append(f"it would fit on {ranks} devices of this size ({usable} usable here)")
    if needed.gpu_total_bytes is not None:
        texts.append(f"it would fit on a device of {format_gib(needed.gpu_total_bytes)}")
    if needed.without_images:
        texts.append("it would fit without images in its prompts")
    return (
        "; ".join(texts) or "oomguard found no setting, number of devices or device size that helps"
    )


def _over_fewer(need: DeviceNeed, usable: Sequence[DeviceSlot], own: Invocation) -> str:
    """Return the command for the available number of devices, if it would start there."""
    start = need.start
    if start is None or not usable or need.devices != start.asked.settings.tensor_parallel_size:
        return "oomguard gpus"
    smallest = min(usable, key=lambda place: place.total_bytes or 0)
    for ranks in range(len(usable), 0, -1):
        if need.devices % ranks:
            continue
        # the attention heads are not divisible by this number
        with contextlib.suppress(UsageError):
            plan = start.over(ranks, _memory(smallest))
            if plan.fits or plan.changes:
                return own.line(gpus="auto", command=start.changed(plan))
    return "oomguard gpus"


def _memory(place: DeviceSlot) -> TargetDevice:
    return TargetDevice(place.total_bytes or 0, None, place.name)


def no_place_now(
    need: DeviceNeed, now: DeviceAvailability, count: int, waited_s: float | None, again: str
) -> PlacementError:
    """Return the error for a command whose devices are in use.

    ``again`` is the line to paste that waits for them.
    """
    if waited_s is None:
        waited = ""
    else:
        waited = f"; waited {waited_s:.0f} s"
    if waited_s is None:
        hint = again
    else:
        hint = "wait longer, or see who uses them: oomguard gpus"
    return PlacementError(
        f"{_devices(count)} needed, but only {len(now.open)} free now{waited}: "
        f"{reasons_by_device(need, now)}",
        hint=hint,
        is_for_now=True,
    )


def reasons_by_device(need: DeviceNeed, now: DeviceAvailability) -> str:
    """Return the reason for each candidate device why the command does not get it."""
    why = [f"{place.shown}: {_why_not_now(place, need, now)}" for place in now.candidates]
    return "; ".join(why) or now.hides or "there is no device"


def _why_not_now(place: DeviceSlot, need: DeviceNeed, now: DeviceAvailability) -> str:
    if place.cannot is not None:
        return place.cannot
    if place.key in now.leased:
        return now.leased[place.key]
    if place.key in now.kept:
        return "reserved for a start that waited longer"
    if place in now.usable:
        return "free"
    never = need.on(place, emptied=True)
    if not never.fits:
        return never.reason
    uses = []
    for pid, size in (place.used_bytes_by_pid or {}).items():
        if size is None:
            uses.append(f"pid {pid}")
        else:
            uses.append(f"pid {pid} {format_gib(size)}")
    users = ", ".join(uses)
    reason = need.on(place).reason
    if need.start is not None and place.free_bytes is not None:
        # The engine's own CUDA context takes memory before the engine checks what is free.
        reason = f"{reason} after the engine's own CUDA context is loaded ({place.room} before)"
    return f"{reason}; used by {users or 'processes that are not visible'}"


def lease_in_words(lease: Lease) -> str:
    """Return the holder of a lease as text."""
    if lease.pid is None:
        who = "another process"
    else:
        who = f"pid {lease.pid}"
    if lease.command:
        what = f" ({lease.command})"
    else:
        what = ""
    if lease.since_s is None:
        since = ""
    else:
        since = f" for {_duration(max(0.0, time.time() - lease.since_s))}"
    until = {"start": ", until its engine has started", "job": ", until it ends"}.get(
        lease.until or "", ""
    )
    return f"leased by {who}{what}{since}{until}"


def _duration(seconds: float) -> str:
    if seconds < _HOUR_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _HOUR_S:.1f} h"


def _devices(count: int) -> str:
    if count == 1:
        return "a device is"
    return f"{count} devices are"


def _engine(need: DeviceNeed) -> str:
    if need.start is None:
        name = "the engine"
    else:
        name = need.start.launcher.NAME
    if need.version is None:
        return name
    return f"{name} {need.version}"
