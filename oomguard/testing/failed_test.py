"""What a failed test on a simulated device shows: its peak beside the device's size, and the diagnosis of the failure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomguard.testing.sizes import written

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


def section(device: SimulatedDevice, error: BaseException) -> str:
    """Return the lines of a report; the diagnosis stands in them where memory ran out."""
    lines = [f"peak {written(device.peak_bytes)} of {written(device.capacity_bytes)} on a simulated device"]
    if device.has_caching_allocator:
        lines.append(f"torch held {written(device.peak_reserved_bytes)} for it")
    if device.other_processes_bytes:
        lines.append(f"other processes held {written(device.other_processes_bytes)}")
    from oomguard.diagnosing import diagnose
    from oomguard.report.note import note

    lines += [note(incident) for incident in diagnose(error).incidents if incident.is_oom]
    return "\n".join(lines)
