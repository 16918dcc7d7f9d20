"""Placement on a real GPU (`make test-gpu`): NVML's own figures, the device that a command gets, a lease, the live figures.

Nothing here uses CUDA in this process: a device on which it has a context is one that somebody uses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import psutil
import pynvml
import pytest

from support.commands import ROOT
from support.supervising import LIMIT_S, RUN, wait_for

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MIB, GIB = 1 << 20, 1 << 30
HOLDS = """
import os, time, torch
held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
print("HOLDS", os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.get_device_properties(0).uuid, flush=True)
time.sleep({seconds})
"""


class Nvml:
    """The first GPU, as nvidia-ml-py tells of it without us."""

    def __init__(self):
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.uuid, self.name = (
            pynvml.nvmlDeviceGetUUID(self.handle),
            pynvml.nvmlDeviceGetName(self.handle),
        )

    @property
    def memory(self):
        return pynvml.nvmlDeviceGetMemoryInfo(self.handle)

    @property
    def processes(self):
        return {
            p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle)
        }


@pytest.fixture
def gpu():
    found = Nvml()
    yield found
    pynvml.nvmlShutdown()


@pytest.fixture
def unused(gpu):
    """The first GPU, which nobody uses: what is placed here takes no other."""
    if (
        torch.cuda.is_initialized()
        or gpu.processes
        or gpu.memory.used > max(GIB, 0.01 * gpu.memory.total)
    ):
        pytest.skip(
            f"somebody uses the GPU ({gpu.memory.used // MIB} MiB): run this file by itself"
        )
    return gpu


@pytest.fixture
def env(tmp_path):
    hiding = ("OOMGUARD_", "CUDA_VISIBLE_DEVICES")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(hiding)}
    folder = tmp_path / "leases"
    folder.mkdir(mode=0o700)
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OOMGUARD_LEASE_FOLDER": str(folder)}


def oomguard(*words, env):
    words = [sys.executable, "-m", "oomguard", *words]
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def holding(seconds=0.0):
    return [sys.executable, "-c", HOLDS.format(seconds=seconds)]


@contextlib.contextmanager
def started(words, env):
    """A program that was started and says HOLDS or READY, with all that it printed until then; it is ended with all below it."""
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith(("HOLDS", "READY")):
                break
        below = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        try:
            yield process, "".join(said)
        finally:
            process.terminate()
            process.communicate(timeout=60)
            psutil.wait_procs(below, timeout=30)


def test_each_figure_is_nvmls_and_a_process_of_2_gib_is_seen(gpu, env, told):
    before = gpu.memory.used
    with started(holding(60), env) as (process, _):
        own, by_pid = gpu.memory, gpu.processes
        record = json.loads(oomguard("gpus", "--format", "json", env=env).stdout)
        shown = oomguard("gpus", env=env).stdout
    device = record["devices"][0]
    seen = (
        None
        if device["held_by"] is None
        else {row["pid"]: row["bytes"] for row in device["held_by"]}
    )

    told("oomguard gpus", f"\n{shown.strip()}")
    told("NVML", f"{gpu.name} {gpu.uuid} {own.total} bytes, {own.used} used, by process {by_pid}")
    told("driver", record["driver_version"])
    assert (device["name"], device["uuid"], device["total_bytes"]) == (
        gpu.name,
        gpu.uuid,
        own.total,
    )
    assert record["driver_version"] == pynvml.nvmlSystemGetDriverVersion()
    assert device["free_bytes"] == pytest.approx(own.free, abs=64 * MIB)
    assert own.used - before >= 2 * GIB
    assert seen == by_pid
    if process.pid in by_pid:
        assert (by_pid[process.pid] or 2 * GIB) >= 2 * GIB
        assert f"  pid {process.pid}" in shown
    elif not by_pid:  # a container hides who it is
        assert device["unseen_bytes"] >= 2 * GIB


def test_a_command_gets_the_device_and_allocates_on_it(unused, env, told):
    done = oomguard("run", "--gpus", "auto", "--", *holding(), env=env)
    (said,) = [line.split() for line in done.stdout.splitlines() if line.startswith("HOLDS")]

    told("a command under run --gpus auto", said[2:], f"a GPU of {unused.uuid}")
    told("it says", [line for line in done.stderr.splitlines() if "placed" in line.lower()])
    assert done.returncode == 0, done.stderr
    assert said[2] == "0" or unused.uuid.startswith(said[2])
    assert unused.uuid.endswith(said[3])


def test_a_leased_device_is_told_with_who_has_it(unused, env, told):
    env |= {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    waits = [sys.executable, "-c", "import time; print('READY', flush=True); time.sleep(60)"]
    with started([*RUN, "-q", "--gpus", "auto", "--", *waits], env) as (process, said):
        shown = oomguard("gpus", env=env).stdout
        began = time.monotonic()
        second = oomguard("run", "-q", "--gpus", "auto", "--", "true", env=env)
        seconds = time.monotonic() - began
    freed = oomguard("run", "-q", "--gpus", "auto", "--", "true", env=env)

    told(
        "a second start",
        f"status {second.returncode} after {seconds:.2f} s: {second.stderr.strip()}",
    )
    assert "READY" in said
    assert f"leased by pid {process.pid}" in shown
    assert second.returncode == 125
    assert f"leased by pid {process.pid}" in second.stderr
    assert freed.returncode == 0, freed.stderr


def test_live_figures_match_nvmls_device_memory(gpu, env, told):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from support.counted import scraped

    before = gpu.memory.used
    with started([*RUN, "--metrics", "0", "--", *holding(60)], env) as (_, said):
        url = re.search(r"http://\S+", said)[0]
        own = gpu.memory
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = scraped(answer.read().decode())
    total = found[("oomguard_device_memory_total_bytes", "0", gpu.name)]
    used = found[("oomguard_device_memory_used_bytes", "0", gpu.name)]

    told(
        "memory of the device while 2 GiB are held, total and used",
        f"{total:.0f} and {used:.0f}",
        f"{own.total}, {own.used}",
    )
    assert total == own.total
    assert used == pytest.approx(own.total - own.free, abs=64 * MIB)
    assert used - before >= 2 * GIB
    assert wait_for(lambda: gpu.memory.used < before + GIB, 30)
