"""Processes of this machine that hold device memory, or that an engine left behind."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.observe.host import ROOT
from oomguard.observe.nvml import Device

# The number that the Linux kernel gives its first namespace of process ids.
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds device memory; ``own`` says whether it is of this process's user."""

    name: str
    user: str
    own: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.user}"


def sees_the_host_s_pids(root: Path = ROOT) -> bool | None:
    """Whether process ids here are the host's, which are those that NVML tells; None where nothing tells."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    except (OSError, ValueError):
        return None


def memory_holders(devices: tuple[Device, ...] | None, *, host_pids: bool | None = None) -> dict[int, Holder]:
    """pid -> the process that holds device memory, as far as it can be seen.

    Empty where ids here are not the host's: the same number would name another process.
    """
    import psutil

    found: dict[int, Holder] = {}
    if not (sees_the_host_s_pids() if host_pids is None else host_pids):
        return found
    for pid in {pid for device in devices or () for pid in device.used_bytes_by_pid or ()}:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(pid)
            user = process.username()
            found[pid] = Holder(process.name(), user, user == psutil.Process().username())
    return found


def vllm_orphans() -> tuple[dict[int, str], bool]:
    """pid -> title of vLLM's processes that no engine's process is the parent of, and whether some could not be read.

    vLLM names its processes ``VLLM::...``; one that lives on after its parent keeps the device's memory.
    """
    import psutil

    orphans, unseen = {}, False
    for process in psutil.process_iter(["pid", "name", "cmdline", "ppid"]):
        words = process.info["cmdline"]
        unseen = unseen or words is None
        title = (words or [""])[0] or process.info["name"] or ""
        if title.startswith("VLLM::") and "APIServer" not in title and not is_engine(process.info["ppid"]):
            orphans[process.info["pid"]] = title
    return orphans, unseen


def is_engine(pid: int | None) -> bool:
    """Whether a process can be the parent of an engine's: Python, vLLM or Ray; yes where nothing tells."""
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
