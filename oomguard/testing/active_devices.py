"""Return the active simulated devices without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


entered: Final[list[SimulatedDevice]] = []


def active_device() -> SimulatedDevice | None:
    """Return the innermost active simulated device, or None."""
    if entered:
        return entered[-1]
    return None
