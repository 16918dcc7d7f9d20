"""Checks of the devices: what NVML answers, who holds their memory, and what a run left behind."""

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


# What no process owns of a device and is still the driver's own: less than the larger of the two.
_UNSEEN_RATIO: Final = 0.05
_UNSEEN_BYTES: Final = GIB


def device_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder], root: Path
) -> Iterator[Check]:
    """Check NVML and each device.

    Args:
        devices: the devices, None where NVML does not answer.
        holders: the processes that hold device memory, by process id, as far as they can be seen.
        root: the root of the file system that the driver is looked for in.
    """
    driver = nvidia_driver(root)
    if devices is None:
        from oomguard.probe.nvml import nvml_failure

        why = nvml_failure() or "it does not answer"
        text = f"NVML not available ({why}): device memory is unknown, not zero"
        if driver:
            yield Check(
                "nvml", "problem", f"{text}; yet the NVIDIA driver {driver} is loaded", "nvidia-smi"
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
        return Check("device", "unknown", f"{text}; who holds the rest is unknown", "nvidia-smi")
    held = [
        f"pid {pid} ({holders.get(pid, 'not seen from here')}) {_size(used)}"
        for pid, used in sorted(device.used_bytes_by_pid.items())
    ]
    if held:
        text += f"; held by {', '.join(held)}"
    sizes = device.used_bytes_by_pid.values()
    unseen = device.total_bytes - device.free_bytes - sum(used or 0 for used in sizes)
    if unseen > max(_UNSEEN_BYTES, _UNSEEN_RATIO * device.total_bytes) and None not in sizes:
        text += f"; {format_gib(unseen)} is held by processes that cannot be seen from here"
        advice = "nvidia-smi on the host: a container sees its own processes only"
        return Check("device", "unknown", text, advice)
    return Check("device", "ok", text)


def left_over_checks(
    devices: tuple[Device, ...] | None, holders: Mapping[int, Holder]
) -> Iterator[Check]:
    """Check for vLLM processes whose parent is gone, and for device memory that other
    users hold.
    """
    orphans, unseen = vllm_orphans()
    if orphans:
        names = ", ".join(f"{pid} ({name})" for pid, name in orphans.items())
        text = f"vLLM processes without the process that started them: {names}"
        yield Check("left_over", "problem", text, f"kill {' '.join(map(str, orphans))}")
    else:
        if unseen:
            where = " among those that can be seen"
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
            advice = "ask them, or wait"
        yield Check(
            "left_over", "problem", f"other users hold device memory: {', '.join(others)}", advice
        )


def _size(used_bytes: int | None) -> str:
    if used_bytes is None:
        return "a size unknown"
    return format_gib(used_bytes)
