"""CUDA and NVML as this machine lacks them: stand-ins for torch.cuda's functions and the binding's, nothing above."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from oomguard import instrumentation
from oomguard.probe import nvml

GIB = 2**30


class Cuda:
    """Two devices of 8 GiB; torch has memory of those that something was allocated on."""

    def __init__(self) -> None:
        self.live, self.peak, self.ever = [0, 0], [0, 0], [0, 0]

    def allocate(self, size: int, index: int = 0) -> None:
        self.live[index] += size
        self.ever[index] += max(0, size)
        self.peak[index] = max(self.peak[index], self.live[index])

    def stats(self, index: int = 0) -> dict:
        counts = {
            "current": self.live[index],
            "peak": self.peak[index],
            "allocated": self.ever[index],
        }
        reserved = {key: 2 * value for key, value in counts.items()}
        return {"allocated_bytes": {"all": counts}, "reserved_bytes": {"all": reserved}}

    def reset(self, index: int = 0) -> None:
        self.peak[index] = self.live[index]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", made.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: made.peak[0])
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _index: 0.5, raising=False
    )
    properties = SimpleNamespace(total_memory=8 * GIB, uuid="1111-a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    return made


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NVML with two devices, of which the second has the identity that ``cuda`` gives; ``used`` are its processes' bytes."""
    used = {os.getpid(): 2 * GIB, 1: 1 * GIB}
    binding = SimpleNamespace(
        used=used,
        sessions=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: ["GPU-2222-b", "GPU-1111-a"][index],
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(
            total=8 * GIB, free=8 * GIB - sum(used.values())
        ),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in used.items()
        ],
    )

    def change(by: int) -> None:
        binding.sessions += by

    binding.nvmlInit, binding.nvmlShutdown = lambda: change(1), lambda: change(-1)
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    monkeypatch.setattr(nvml, "_has_library", lambda: True)
    monkeypatch.setattr(instrumentation, "sees_host_pids", lambda: True)
    return binding
