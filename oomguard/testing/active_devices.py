"""The simulated devices that are in force, outermost first; asking for them imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


entered: Final[list[SimulatedDevice]] = []


def active_device() -> SimulatedDevice | None:
    """The innermost simulated device that is in force, None outside."""
    if entered:
        return entered[-1]
    return None
