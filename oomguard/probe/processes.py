"""Find processes of this machine that use device memory, or that an engine left behind."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.probe.host import ROOT
from oomguard.probe.nvml import Device

# The number of the first namespace of process ids in the Linux kernel.
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Holder:
    """Describe a process with device memory; ``own`` is True if it belongs to this user."""

    name: str
    user: str
    own: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.user}"


def sees_host_pids(root: Path = ROOT) -> bool | None:
    """Return whether process ids here are the host's, which NVML uses; None if unknown."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except (OSError, ValueError):
        return None


def memory_holders(
    devices: tuple[Device, ...] | None, *, host_pids: bool | None = None
) -> dict[int, Holder]:
    """Return the visible processes with device memory, by process id.

    Args:
        devices: the devices from NVML; None if it does not answer.
        host_pids: whether process ids here are the host's; None asks the kernel. If they are not,
            the result is empty, because the same number means another process here.
    """
    import psutil

    found: dict[int, Holder] = {}
    if not (sees_host_pids() if host_pids is None else host_pids):
        return found
    for pid in {pid for device in devices or () for pid in device.used_bytes_by_pid or ()}:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(pid)
            user = process.username()
            found[pid] = Holder(process.name(), user, user == psutil.Process().username())
    return found


def vllm_orphans() -> tuple[dict[int, str], bool]:
    """Return vLLM processes without an engine as parent, and whether some were unreadable.

    vLLM names its processes ``VLLM::...``. A process that outlives its parent keeps its device
    memory.

    Returns:
        The titles by process id, and whether some processes were unreadable.
    """
    import psutil

    orphans = {}
    unseen = False
    for process in psutil.process_iter(["pid", "name", "cmdline", "ppid"]):
        words = process.info["cmdline"]
        unseen = unseen or words is None
        title = (words or [""])[0] or process.info["name"] or ""
        if (
            title.startswith("VLLM::")
            and "APIServer" not in title
            and not is_engine(process.info["ppid"])
        ):
            orphans[process.info["pid"]] = title
    return orphans, unseen


def is_engine(pid: int | None) -> bool:
    """Return whether a process can be an engine's parent: Python, vLLM or Ray.

    True if the process is unreadable.
    """
    import psutil

    if pid is None:
        return True
    try:
        parent = psutil.Process(pid)
        words = [parent.name(), *parent.cmdline()[:3]]
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError, ValueError):
        return True
    return any(mark in word.lower() for word in words for mark in ("python", "vllm", "ray"))
