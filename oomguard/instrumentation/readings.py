"""Read every memory counter of this machine: torch's, NVML's and the host's.

Unknown counters are left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from oomguard.core.measurements import ALLOCATED, HOST, IN_USE, OTHERS, OWN, RESIDENT, Counter
from oomguard.probe import torch_memory
from oomguard.probe.host import Resident, resident_bytes
from oomguard.probe.nvml import Device, Session, sees_host_pids

Bytes = dict[Counter, int]
_RESIDENT: Final = Counter(HOST, RESIDENT)


class Readings:
    """Read the counters; NVML and a kernel file stay open between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._nvml: Session | None = None
        self._resident: Resident | None = None
        self._knows_pids = False
        self._is_own: dict[int, bool] = {}

    def begin(self) -> None:
        """Open NVML and the kernel file, if they exist."""
        self._resident = Resident()
        self._nvml = Session.begin()
        # NVML tells the host's process ids: in a container they are other processes' here.
        self._knows_pids = self._nvml is not None and bool(sees_host_pids())

    def end(self) -> None:
        """Close NVML and the kernel file."""
        self.forget_files()
        if self._nvml is not None:
            self._nvml.end()
            self._nvml = None

    def forget_files(self) -> None:
        """Close the kernel file in a forked child, because it describes the parent."""
        resident = self._resident
        self._resident = None
        if resident is not None:
            resident.end()

    def now(self) -> Bytes:
        """Return the values of all counters."""
        return self._with_others(torch_memory.now())

    def of_call(self) -> Bytes:
        """Return the counters for one call: torch's, or without torch NVML's and the host's."""
        found = torch_memory.now()
        return found or self._with_others(found)

    def limits(self) -> Bytes:
        """Return the total memory of each device."""
        found = torch_memory.limits()
        if self._nvml is not None:
            names = self._names(found)
            for device in self._nvml.devices():
                if device.total_bytes is not None and device.index in names:
                    found[Counter(names[device.index], IN_USE)] = device.total_bytes
        return found

    def _with_others(self, found: Bytes) -> Bytes:
        """Add NVML's and the host's counters to torch's."""
        if self._nvml is not None:
            found |= self._of_nvml(found)
        kept = self._resident
        if kept is None:
            resident = resident_bytes()
        else:
            resident = kept.bytes()
        if resident is not None:
            found[_RESIDENT] = resident
        return found

    def _of_nvml(self, of_torch: Bytes) -> Bytes:
        found: Bytes = {}
        if self._nvml is None:
            return found
        names = self._names(of_torch)
        for device in self._nvml.devices():
            if device.index in names:
                found |= {
                    Counter(names[device.index], what): size
                    for what, size in self._shares(device).items()
                }
        return found

    def _names(self, of_torch: Bytes) -> dict[int, str]:
        """Return a name for each NVML device in use by torch, or for all without torch."""
        assert self._nvml is not None  # noqa: S101 - asked only while it is open
        uuids = self._nvml.uuids
        worked_on = sorted(
            {
                key.device
                for key in of_torch
                if key.what == ALLOCATED and key.device.startswith("cuda:")
            }
        )
        if not worked_on:
            return {index: f"GPU {index}" for index in uuids}
        names: dict[int, str] = {}
        with contextlib.suppress(Exception):  # this torch does not report the identity of a device
            cuda = sys.modules["torch"].cuda
            for name in worked_on:
                own = str(cuda.get_device_properties(int(name.removeprefix("cuda:"))).uuid)
                names |= {
                    index: name for index, uuid in uuids.items() if uuid and uuid.endswith(own)
                }
        return names

    def _shares(self, device: Device) -> dict[str, int]:
        """Return a device's memory in use: of all processes, of this one, and of the others.

        The last two are left out if NVML does not report them.
        """
        if device.total_bytes is None or device.free_bytes is None:
            return {}
        used = device.total_bytes - device.free_bytes
        found = {IN_USE: used}
        by_pid = device.used_bytes_by_pid
        if self._knows_pids and by_pid is not None:
            own = [size for pid, size in by_pid.items() if self._belongs_here(pid)]
            if None not in own:
                found[OWN] = sum(size for size in own if size is not None)
                found[OTHERS] = max(0, used - found[OWN])
        return found

    def _belongs_here(self, pid: int) -> bool:
        """Return whether a process is this one or its descendant, such as an engine core."""
        if pid not in self._is_own:
            import psutil

            self._is_own[pid] = False
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                line = [pid, *(parent.pid for parent in psutil.Process(pid).parents())]
                self._is_own[pid] = os.getpid() in line
        return self._is_own[pid]
