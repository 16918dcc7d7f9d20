"""The variables under which a command sees the devices that it was given, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomguard.placement.need import Need
from oomguard.placement.places import BY_BUS, ORDER, VISIBLE, Place


def variables_for(places: Sequence[Place], need: Need) -> dict[str, str]:
    """Return the variables for some places.

    By UUID where the command's engine is known to read one, so that a device that falls off or comes back moves no other one into its
    place; else by index, counted along the bus as NVML does. An instance of a divided GPU has no other name than its UUID.
    """
    by_uuid = need.visible.uuid or any(place.instance is not None for place in places)
    uuids = [place.uuid for place in places]
    if by_uuid and all(uuid is not None for uuid in uuids):
        return {VISIBLE: ",".join(str(uuid) for uuid in uuids), ORDER: BY_BUS}
    return {VISIBLE: ",".join(str(place.index) for place in places), ORDER: BY_BUS}


def in_front(variables: Mapping[str, str]) -> str:
    """Return the variables as they stand before a command in a shell."""
    return " ".join(f"{name}={value}" for name, value in variables.items())
