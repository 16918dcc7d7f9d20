"""Layers of a model that wait on the host and come to the device when they run: accelerate's hooks, on a simulated device too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from oomguard.engines.transformers.place import Place
from oomguard.facts import format_gib
from oomguard.log import get_logger
from oomguard.observe import torch_memory

# More than any host has: on a simulated device the host is not counted.
_ANY_BYTES = 1 << 62


def keep_on_host(model: Any, place: Place, share_bytes: int, host_bytes: int | None = None) -> None:
    """Put the layers of a model that fit in ``share_bytes`` on the device; the others stay on the host.

    The model is on the host. Beside those layers the largest of the others has room. Which they are accelerate solves.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    limits = {place.index: share_bytes, "cpu": _ANY_BYTES if host_bytes is None else host_bytes}
    no_split = getattr(model, "_no_split_modules", None)
    found = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=list(no_split or ()))
    if not place.is_simulated:
        dispatch_model(model, device_map=found, skip_keys=getattr(model, "_skip_keys_device_placement", None))
        return
    _hook(model, [name for name, where in found.items() if where == "cpu"], list(found))
    model.hf_device_map = found


def put_on_simulated(model: Any) -> None:
    """Count the weights of a model on the simulated device, and raise its error where they do not fit."""
    torch_memory.place([*model.parameters(), *model.buffers()])


class _Waiting(Mapping[str, Any]):
    """Weights of the host; each that is asked for is a copy of its own on the simulated device, which ends with its use."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        return torch_memory.from_host(tensor, tensor.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _hook(model: Any, waiting: list[str], names: list[str]) -> None:
    from accelerate.hooks import attach_align_device_hook_on_blocks
    from accelerate.utils import find_tied_parameters, retie_parameters

    def waits(tensor: str) -> bool:
        return any(tensor == name or tensor.startswith(f"{name}.") for name in waiting)

    with torch_memory.on_host():
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if waits(name)}
        tied = find_tied_parameters(model)
        attach_align_device_hook_on_blocks(
            model,
            execution_device=dict.fromkeys(["", *names], "cpu"),
            offload={name: name in waiting for name in names},
            weights_map=_Waiting(tensors),
            skip_keys=getattr(model, "_skip_keys_device_placement", None),
        )
        retie_parameters(model, tied)
    size = sum(tensor.nbytes for tensor in tensors.values())
    get_logger().debug("layers wait on the host", size=format_gib(size))
