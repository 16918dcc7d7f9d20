"""Show the GPUs of this machine with ``oomguard gpus``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomguard.cli.options import GroupedCommand, color_option, console_of, format_option
from oomguard.cluster.options import lease_folder_option
from oomguard.cluster.placement.devices import (
    DeviceMask,
    DeviceSlot,
    apply_visible_devices,
    device_slots,
)
from oomguard.cluster.placement.leases import Lease, LeaseFolder
from oomguard.cluster.placement.need import lease_in_words
from oomguard.core.errors import UsageError
from oomguard.core.facts import format_gib
from oomguard.core.presentable import drawn, process_label
from oomguard.probe.nvml import Gpu, Survey, sees_host_pids, survey
from oomguard.report.json import SCHEMA, plain_value

if TYPE_CHECKING:
    from rich.console import Console


@click.command(
    "gpus",
    cls=GroupedCommand,
    common=("form", "lease_folder"),
    example="oomguard gpus --format json",
)
@format_option("the devices")
@lease_folder_option
@color_option
def command(form: str, lease_folder: str | None, color: str) -> int:
    """Show each GPU: memory, processes, MIG instances, leases, and what this user cannot see.

    Exit status: 0, even if NVML does not answer; the output then shows the reason.
    """
    from oomguard.cluster.placement.leases import LeaseFolder
    from oomguard.report.json import json_line

    found = inspect_devices(
        LeaseFolder(None if lease_folder is None else Path(lease_folder).absolute(), makes=False),
        dict(os.environ),
    )
    if form == "json":
        click.echo(json_line(gpus_record(found)))
    else:
        print_gpus(console_of(form, color), found)
    return 0


# Report the GPUs of this machine as terminal lines and as JSON.


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Describe one device with its lease, and whether CUDA_VISIBLE_DEVICES permits it."""

    place: DeviceSlot
    lease: Lease | None
    is_visible: bool

    @property
    def unseen_bytes(self) -> int | None:
        """The memory that no visible process holds, or None if it is unknown."""
        own = self.place
        if own.used_bytes_by_pid is None:
            sizes = None
        else:
            sizes = own.used_bytes_by_pid.values()
        if own.total_bytes is None or own.free_bytes is None or sizes is None or None in sizes:
            return None
        return max(0, own.total_bytes - own.free_bytes - sum(size or 0 for size in sizes))


@dataclass(frozen=True, slots=True)
class DeviceOverview:
    """Hold everything that ``oomguard gpus`` shows.

    Attributes:
        survey: the answers of NVML.
        places: the GPUs and MIG instances in PCI bus order.
        folder: the folder of leases.
        pids_are_known: whether NVML's process IDs are valid here; in a container they are the
            host's.
        hidden: one line for each thing that this user cannot see.
    """

    survey: Survey
    places: tuple[DeviceStatus, ...]
    folder: LeaseFolder
    pids_are_known: bool
    hidden: tuple[str, ...]

    def gpu(self, place: DeviceSlot) -> Gpu:
        """Return the GPU that a device belongs to."""
        return next(gpu for gpu in self.survey.gpus if gpu.device.index == place.index)


def inspect_devices(folder: LeaseFolder, environ: Mapping[str, str]) -> DeviceOverview:
    """Inspect the devices of this machine without locking or changing anything."""
    found = survey()
    known = sees_host_pids() is True
    places = device_slots(found)
    try:
        limit = apply_visible_devices(places, environ)
        wrong = None
    except UsageError as error:
        # The overview shows all devices, together with the reason why the mask is invalid.
        limit = DeviceMask(places)
        wrong = f"{error}; {error.hint}"
    leases = folder.holders(place.key for place in places)
    statuses = []
    for place in places:
        statuses.append(DeviceStatus(place, leases.get(place.key), place in limit.places))
    seen = tuple(statuses)
    hidden = (limit.hides, wrong, *_hidden(found, seen, pids_are_known=known))
    return DeviceOverview(found, seen, folder, known, tuple(filter(None, hidden)))


def _hidden(
    found: Survey, seen: tuple[DeviceStatus, ...], *, pids_are_known: bool
) -> Iterator[str]:
    if found.failure is not None:
        if found.driver:
            driver = f", driver {found.driver}"
        else:
            driver = ""
        yield f"NVML does not answer: {found.failure}{driver}. The devices are unknown"
        return
    for one in seen:
        if one.place.used_bytes_by_pid is None and one.place.cannot is None:
            yield (
                f"{one.place.shown}: the driver does not report which processes use it (an old "
                "driver, MIG, or no permission)"
            )
        if one.unseen_bytes and not one.place.is_empty and not one.place.used_bytes_by_pid:
            yield (
                f"{one.place.shown}: processes that are not visible here hold "
                f"{format_gib(one.unseen_bytes)}"
            )
    # In a container without the host's PID namespace, these numbers name other processes.
    processes = [one.place.used_bytes_by_pid for one in seen]
    if not pids_are_known and any(processes):
        yield ("process IDs are the host's: inside this container they mean other processes")


def gpus_record(overview: DeviceOverview) -> dict[str, Any]:
    """Return the devices as the JSON contract defines them, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "driver_version": overview.survey.driver,
        "failure": overview.survey.failure,
        "devices": [_record(overview, one) for one in overview.places],
        "leases": {"folder": str(overview.folder.path), "off": overview.folder.why_off},
        "hidden": list(overview.hidden),
    }


def _record(overview: DeviceOverview, one: DeviceStatus) -> dict[str, Any]:
    own = one.place
    gpu = overview.gpu(one.place)
    holders = None
    if own.used_bytes_by_pid is not None:
        holders = []
        for pid, size in sorted(own.used_bytes_by_pid.items()):
            holders.append({"pid": pid, "process": _process(overview, pid), "bytes": size})
    return {
        "index": own.index,
        "instance": own.instance,
        "uuid": own.uuid,
        "name": own.name,
        "total_bytes": own.total_bytes,
        "free_bytes": own.free_bytes,
        "is_divided": gpu.is_divided,
        "failure": gpu.failure,
        "is_visible": one.is_visible,
        "held_by": holders,
        "unseen_bytes": one.unseen_bytes,
        "lease": None if one.lease is None else _lease(one.lease),
    }


def _lease(lease: Lease) -> dict[str, Any]:
    if lease.since_s is None:
        held_s = None
    else:
        held_s = max(0.0, round(time.time() - lease.since_s, 1))
    return {
        "pid": lease.pid,
        "command": plain_value(lease.command),
        "until": lease.until,
        "held_s": held_s,
    }


def print_gpus(console: Console, overview: DeviceOverview) -> None:
    """Print each device with its processes and lease, then what this user cannot see."""
    for line in _lines(overview):
        console.print(drawn(line), markup=False, highlight=False, soft_wrap=True)


def _lines(overview: DeviceOverview) -> Iterator[str]:
    last_index: int | None = None
    for one in overview.places:
        own = one.place
        is_part = own.instance is not None
        if is_part:
            head = f"  instance {own.instance}"
        else:
            head = f"GPU {own.index}"
        # The instances of a GPU follow each other, and the first one has the heading.
        if is_part and own.index != last_index:
            yield f"GPU {own.index}  divided (MIG): only its instances are usable"
        last_index = own.index
        if one.is_visible:
            hidden = ""
        else:
            hidden = "  hidden by CUDA_VISIBLE_DEVICES"
        state = own.cannot or own.room
        yield "  ".join(filter(None, (head, own.name, state, own.uuid))) + hidden
        if is_part:
            pad = "    "
        else:
            pad = "  "
        for pid, size in sorted((own.used_bytes_by_pid or {}).items()):
            yield (
                f"{pad}{_process(overview, pid)}: "
                f"{'unknown size' if size is None else format_gib(size)}"
            )
        if one.lease is not None:
            yield f"{pad}{lease_in_words(one.lease)}"
    if not overview.places and overview.survey.failure is None:
        yield "no GPU"
    yield from overview.hidden
    if overview.folder.why_off is not None:
        yield f"no leases: {overview.folder.why_off}"


def _process(overview: DeviceOverview, pid: int) -> str:
    if overview.pids_are_known:
        return process_label(pid)
    return f"pid {pid} of the host"
