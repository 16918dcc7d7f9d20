"""The device that a program puts a model's weights on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from oomguard.observe import torch_memory

# What accelerate solves itself.
AUTOMATIC: Final = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})


class NotOneDeviceError(Exception):
    """The weights go to no device that is watched, or to several."""


@dataclass(frozen=True, slots=True)
class Place:
    """One device.

    Attributes:
        index: its number among CUDA's.
        is_simulated: whether it is a simulated one, whose tensors are the CPU's.
        is_chosen: whether the program named it.
    """

    index: int
    is_simulated: bool
    is_chosen: bool

    @property
    def name(self) -> str:
        """How a program names it in ``max_memory``."""
        return str(self.index)


def place_of(given: Any) -> Place:
    """Return the device that a ``device_map`` or a device means; raise NotOneDeviceError where it is none that is watched."""
    import torch

    is_chosen = given is not None and not (isinstance(given, str) and given in AUTOMATIC)
    if torch_memory.is_simulated():
        return Place(0, True, is_chosen)
    if isinstance(given, dict):
        values = {str(value) for value in given.values()}
        if len(values) != 1:
            raise NotOneDeviceError
        given = next(iter(given.values()))
    if not is_chosen:
        if given is None or torch.cuda.device_count() != 1:
            raise NotOneDeviceError
        given = 0
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise NotOneDeviceError
    index = torch.cuda.current_device() if device.index is None else device.index
    if index != torch.cuda.current_device():
        raise NotOneDeviceError  # what is alive is counted on the current one
    return Place(index, False, is_chosen)
