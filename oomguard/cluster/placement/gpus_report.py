"""The devices of this machine: as lines for a terminal and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from oomguard.cluster.placement.leases import Lease
from oomguard.cluster.placement.overview import Overview, SeenPlace
from oomguard.cluster.placement.refusal import lease_in_words
from oomguard.core.facts import format_gib
from oomguard.report.json import SCHEMA, plain_value
from oomguard.report.presentable import drawn
from oomguard.report.processes import named

if TYPE_CHECKING:
    from rich.console import Console


def gpus_record(overview: Overview) -> dict[str, Any]:
    """Return the devices as the JSON contract has them, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "driver_version": overview.survey.driver,
        "failure": overview.survey.failure,
        "devices": [_record(overview, one) for one in overview.places],
        "leases": {"folder": str(overview.folder.path), "off": overview.folder.why_off},
        "hidden": list(overview.hidden),
    }


def _record(overview: Overview, one: SeenPlace) -> dict[str, Any]:
    own = one.place
    gpu = overview.gpu(one.place)
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
        "held_by": None
        if own.used_bytes_by_pid is None
        else [
            {"pid": pid, "process": _process(overview, pid), "bytes": size}
            for pid, size in sorted(own.used_bytes_by_pid.items())
        ],
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


def print_gpus(console: Console, overview: Overview) -> None:
    """Print each device with who holds what of it, then what is hidden from here."""
    for line in _lines(overview):
        console.print(drawn(line), markup=False, highlight=False, soft_wrap=True)


def _lines(overview: Overview) -> Iterator[str]:
    for one in overview.places:
        own = one.place
        is_part = own.instance is not None
        if is_part:
            head = f"  instance {own.instance}"
        else:
            head = f"GPU {own.index}"
        if is_part and own.instance == min(
            p.place.instance or 0 for p in overview.places if p.place.index == own.index
        ):
            yield f"GPU {own.index}  divided (MIG): only its instances can be used"
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
                f"{'a size not told' if size is None else format_gib(size)}"
            )
        if one.lease is not None:
            yield f"{pad}{lease_in_words(one.lease)}"
    if not overview.places and overview.survey.failure is None:
        yield "no GPU"
    yield from overview.hidden
    if overview.folder.why_off is not None:
        yield f"no leases: {overview.folder.why_off}"


def _process(overview: Overview, pid: int) -> str:
    if overview.pids_are_known:
        return named(pid)
    return f"pid {pid} of the host"
