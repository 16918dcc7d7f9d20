"""The simulated device of a run: one for the harness' thread, and one of the same size for each
thread that asks.
"""

from collections.abc import Callable
from typing import Any

import torch
from oomguard.testing import SimulatedDevice

HUGE = 1 << 40
_capacity = HUGE
_models: list[Any] = []
_peaks: list[int] = []


def tensors_of(models: list[Any]) -> list[torch.Tensor]:
    """Parameters and buffers of the models, as on the device before the first call."""
    return [t for m in models for t in (*m.parameters(), *m.buffers())]


def configure(capacity: int, models: list[Any]) -> None:
    """Set what ``on_device`` gives to threads of the run that follows."""
    global _capacity, _models
    _capacity = capacity
    _models = models
    _peaks.clear()


def thread_peak() -> int:
    """The highest peak of any thread's device since ``configure``."""
    return max(_peaks, default=0)


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` on a simulated device of its own thread: the simulation sees only the thread it
    was entered in.
    """

    def inside(*args: Any, **kwargs: Any) -> Any:
        device = SimulatedDevice(_capacity)
        with device:
            device.adopt(tensors_of(_models))
            try:
                return function(*args, **kwargs)
            finally:
                _peaks.append(device.peak_bytes)

    return inside
