"""Check the devices: NVML's answer, the processes that use memory, and leftover processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from oomguard.core.facts import GIB, format_gib
from oomguard.core.records import Check
from oomguard.probe.host import nvidia_driver
from oomguard.probe.processes import Holder, vllm_orphans

if TYPE_CHECKING:
    from oomguard.probe.nvml import Device


# The driver itself uses memory without a process, but less than the larger of these two.
_UNSEEN_RATIO: Final = 0.05
_UNSEEN_BYTES: Final = GIB


def device_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder], root: Path
) -> Iterator[Check]:
    """Check NVML and each device.

    Args:
        devices: the devices; None if NVML does not answer.
        holders: the visible processes with device memory, by process id.
        root: the root of the file system, which contains the driver's files.
    """
    driver = nvidia_driver(root)
    if devices is None:
        from oomguard.probe.nvml import nvml_failure

        why = nvml_failure() or "NVML does not answer"
        text = f"NVML not available ({why}): device memory is unknown, not zero"
        if driver:
            yield Check(
                "nvml",
                "problem",
                f"{text}, although the NVIDIA driver {driver} is loaded",
                "nvidia-smi",
            )
        else:
            yield Check("nvml", "unknown", text, "nvidia-smi")
        return
    yield Check(
        "nvml",
        "ok",
        f"NVML answers{f', NVIDIA driver {driver}' if driver else ''}: {len(devices)} devices",
    )
    for device in devices:
        yield _device_check(device, holders)


def _device_check(device: Device, holders: Mapping[int, Holder]) -> Check:
    text = f"device {device.index}: {device.name or 'name unknown'}"
    if device.total_bytes is None or device.free_bytes is None:
        text += ", its memory is unknown (MIG, or no permission)"
        return Check("device", "unknown", text, "nvidia-smi -q -d MEMORY")
    text += f", {format_gib(device.free_bytes)} of {format_gib(device.total_bytes)} free"
    if device.used_bytes_by_pid is None:
        return Check(
            "device",
            "unknown",
            f"{text}; the processes that use the rest are unknown",
            "nvidia-smi",
        )
    held = [
        f"pid {pid} ({holders.get(pid, 'not seen from here')}) {_size(used)}"
        for pid, used in sorted(device.used_bytes_by_pid.items())
    ]
    if held:
        text += f"; used by {', '.join(held)}"
    sizes = device.used_bytes_by_pid.values()
    unseen = device.total_bytes - device.free_bytes - sum(used or 0 for used in sizes)
    if unseen > max(_UNSEEN_BYTES, _UNSEEN_RATIO * device.total_bytes) and None not in sizes:
        text += f"; {format_gib(unseen)} is used by processes that are not visible here"
        advice = "run nvidia-smi on the host, because a container sees only its own processes"
        return Check("device", "unknown", text, advice)
    return Check("device", "ok", text)


def left_over_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder]
) -> Iterator[Check]:
    """Check for orphaned vLLM processes, and for device memory of other users."""
    orphans, unseen = vllm_orphans()
    if orphans:
        names = ", ".join(f"{pid} ({name})" for pid, name in orphans.items())
        text = f"vLLM processes without the process that started them: {names}"
        yield Check("left_over", "problem", text, f"kill {' '.join(map(str, orphans))}")
    else:
        if unseen:
            where = " among the visible processes"
        else:
            where = ""
        yield Check("left_over", "ok", f"no vLLM process is left over{where}")
    others = [
        f"{holders[pid].user} (pid {pid}) {_size(used)} of device {device.index}"
        for device in devices or ()
        for pid, used in sorted((device.used_bytes_by_pid or {}).items())
        if pid in holders and not holders[pid].own
    ]
    if others:
        free = {d.free_bytes: d.index for d in devices or () if d.free_bytes is not None}
        if len(free) > 1:
            advice = f"export CUDA_VISIBLE_DEVICES={free[max(free)]}"
        else:
            advice = "ask these users to release it, or wait"
        yield Check(
            "left_over", "problem", f"other users use device memory: {', '.join(others)}", advice
        )


def _size(used_bytes: int | None) -> str:
    if used_bytes is None:
        return "an unknown size"
    return format_gib(used_bytes)
