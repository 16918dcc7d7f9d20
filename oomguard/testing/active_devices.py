"""Return the active simulated devices without importing torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from oomguard.testing.simulated_device import SimulatedDevice


entered: Final[list[SimulatedDevice]] = []


def active_device() -> SimulatedDevice | None:
    """Return the innermost active simulated device of this thread.

    A thread without one gets the device that another thread entered last; None without any.
    """
    devices = entered.copy()
    this_thread = threading.get_ident()
    for device in reversed(devices):
        if device.thread == this_thread:
            return device
    if devices:
        return devices[-1]
    return None
