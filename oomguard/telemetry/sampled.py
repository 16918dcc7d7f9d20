"""What is read when somebody asks and kept nowhere: the command's own memory, and the devices'."""

from __future__ import annotations

import contextlib

from oomguard.observe import nvml
from oomguard.telemetry.tally import Figure


def sampled(pid: int | None) -> dict[str, Figure]:
    """Return the figures of now; None for what nobody tells, which is then not exported.

    NVML is opened and closed each time: a handle that is kept would stand in the way of a device's reset.
    """
    devices: dict[tuple[str, ...], nvml.Device] = {(str(d.index), d.name or ""): d for d in nvml.devices() or ()}
    total = {labels: d.total_bytes for labels, d in devices.items() if d.total_bytes is not None}
    used = {
        labels: d.total_bytes - d.free_bytes
        for labels, d in devices.items()
        if d.total_bytes is not None and d.free_bytes is not None
    }
    return {
        "resident_bytes": None if pid is None else resident_bytes(pid),
        "device_total_bytes": total,
        "device_used_bytes": used,
    }


def resident_bytes(pid: int) -> int | None:
    """Return the host memory that a process and all below it hold; None where it is gone."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended since
                found.append(process.memory_info().rss)
    return sum(found) if found else None
