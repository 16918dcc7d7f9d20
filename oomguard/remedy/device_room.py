"""The bytes that a failed call or load has of its device, by the figures of the failure: the device's size, or a cap below it."""

from __future__ import annotations

from typing import Final

from oomguard.facts import GIB, MIB
from oomguard.incident import Incident

# Sizes are printed with two decimals of their unit: the true one may be less by half of the last.
HALF_DECIMAL: Final = 0.005


def device_room_bytes(incident: Incident, base_bytes: int | None, margin_ratio: float) -> float | None:
    """Return what may be taken beyond ``base_bytes`` that are alive; None where a size is not known.

    A memory fraction caps what torch's allocator holds, whatever else is on the device.
    """
    total = incident.number("device_total_bytes")
    if base_bytes is None or not total:
        return None
    others = incident.number("other_process_in_use_bytes") or 0
    beside_tensors = incident.number("non_torch_bytes") or 0
    room = (total - others) * (1 - margin_ratio) - beside_tensors
    allowed = incident.number("allowed_bytes")
    if allowed:
        surely = allowed - HALF_DECIMAL * (GIB if allowed >= GIB else MIB)
        room = min(room, surely * (1 - margin_ratio))
    return room - base_bytes
