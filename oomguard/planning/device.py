"""The GPU that is budgeted for: given by its size, by its name, or one of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import parse_size
from oomguard.estimate.constants import free_at_start, kind_of

_HOW_TO_SAY: str = (
    "say which: --gpu-memory 24GiB or --gpu-name H100; in Python gpu_memory='24GiB' or "
    "gpu_name='H100'"
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its total memory, its name and its driver where they are known, and whether it is a
    GPU of this machine.
    """

    total_bytes: int
    name: str | None = None
    of_this_machine: bool = False
    driver_version: str | None = None


def find_gpu(
    memory: str | int | None = None, index: int | None = None, name: str | None = None
) -> Gpu:
    """Find the GPU that is named, else the first one of this machine.

    Args:
        memory: total memory, in bytes or as a size such as ``24GiB``.
        index: index of a GPU of this machine.
        name: a GPU by its name, such as ``H100``. Beside ``memory`` any name: it decides the
            engine's defaults, not the size.

    Raises:
        SettingError: the memory is no size above zero, or the name is not known.
        UsageError: an index is given beside another, or no GPU can be seen here.
    """
    if index is not None and (memory is not None or name is not None):
        raise UsageError(
            "gpu names a GPU of this machine, with its size and its name",
            hint="leave the others out",
        )
    if memory is not None:
        return Gpu(_read_total(memory), name)
    if name is not None:
        from oomguard.estimate.constants import gpu_total_bytes

        return Gpu(gpu_total_bytes(name), name)
    from oomguard.probe.nvml import devices

    device = next((d for d in devices() or () if d.index == (index or 0) and d.total_bytes), None)
    if device is None or device.total_bytes is None:
        if index is None:
            what = "no GPU can be seen here"
        else:
            what = f"GPU {index} cannot be seen here"
        raise UsageError(what, hint=_HOW_TO_SAY)
    from oomguard.probe.host import nvidia_driver

    return Gpu(
        device.total_bytes, device.name, of_this_machine=True, driver_version=nvidia_driver()
    )


def _read_total(memory: str | int) -> int:
    if isinstance(memory, str):
        total = parse_size(memory).bytes
    else:
        total = memory
    if isinstance(total, bool) or not isinstance(total, int) or total <= 0:
        hint = "give the total memory of one GPU, in bytes or as a size such as 24GiB"
        raise SettingError(f"gpu_memory is {memory!r}", hint=hint)
    return total


def kind_of_gpu(gpu: Gpu) -> str:
    """Return whose memory a GPU's is, one of ``ceilings.KINDS``: by its name and, on this machine,
    by the host.
    """
    from oomguard.probe.host import wsl_version

    return kind_of(gpu.name, on_wsl2=gpu.of_this_machine and wsl_version() == 2)


def free_of(gpu: Gpu, kind: str, replicas: int) -> tuple[int | None, str]:
    """Return the bytes of a GPU that are free when an engine starts, and what says so.

    None stands for all but the CUDA context, which is what an empty GPU of its own leaves.

    Args:
        gpu: the GPU.
        kind: one of ``ceilings.KINDS``.
        replicas: engines that share a time-sliced GPU.

    Raises:
        SettingError: the kind is not known.
    """
    return free_at_start(gpu.total_bytes, kind, replicas)
