"""Explain why a command gets no device, with numbers and a line to paste."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from oomguard.cluster.placement.devices import DeviceSlot
from oomguard.cluster.placement.leases import Lease
from oomguard.cluster.placement.need import DeviceAvailability, DeviceNeed, DeviceRequest
from oomguard.core.errors import PlacementError, UsageError
from oomguard.core.facts import format_gib
from oomguard.estimate.start.start import StartBudget
from oomguard.planning.start import CommandStart, Needed, TargetDevice


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
    if plan.changes:
        return PlacementError(what, hint=own.line(command=need.start.changed(plan)))
    return PlacementError(what, hint=_otherwise(need.start, plan.needed, largest, len(usable), own))


def _least(budget: StartBudget) -> str:
    """Return the memory of the fullest device with the smallest sufficient KV cache."""
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
