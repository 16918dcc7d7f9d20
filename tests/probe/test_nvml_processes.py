"""Processes that hold device memory or were left behind: real processes, real parents."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from oomguard.probe.nvml import Device, is_engine, memory_holders, sees_host_pids, vllm_orphans


def device(*pids: int) -> tuple[Device, ...]:
    return (Device(0, "A", 2**30, 0, dict.fromkeys(pids, 1)),)


def test_a_holder_is_named_with_its_user():
    (holder,) = memory_holders(device(os.getpid()), host_pids=True).values()

    assert holder.own
    assert str(holder) == f"{psutil.Process().name()}, {psutil.Process().username()}"


def test_a_pid_of_nobody_is_left_out():
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert memory_holders(device(gone.pid), host_pids=True) == {}


def test_no_device_has_no_holder():
    assert memory_holders(None, host_pids=True) == {}


def test_where_pids_are_not_the_host_s_no_process_is_named():
    assert memory_holders(device(os.getpid()), host_pids=False) == {}


def test_only_the_first_namespace_has_the_hosts_pids(tmp_path: Path):
    assert sees_host_pids(tmp_path) is None
    link = tmp_path / "proc/self/ns/pid"
    link.parent.mkdir(parents=True)
    for target, answer in (("pid:[4026531836]", True), ("pid:[4026532758]", False)):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        assert sees_host_pids(tmp_path) is answer


def test_python_parent_is_an_engines_and_a_dead_one_is_not():
    assert is_engine(os.getpid())
    assert is_engine(None)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert not is_engine(gone.pid)


def test_a_vllm_process_whose_parent_is_gone_is_found_and_named():
    started = subprocess.run(
        ["bash", "-c", "(exec -a VLLM::EngineCore sleep 600 >/dev/null 2>&1 & echo $!)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    pid = int(started.stdout)
    try:
        deadline = time.monotonic() + 200
        while (
            psutil.Process(pid).cmdline()[:1] != ["VLLM::EngineCore"]
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        if is_engine(psutil.Process(pid).ppid()):
            pytest.skip("orphans are adopted by a Python process here")
        orphans, _ = vllm_orphans()
        assert orphans[pid] == "VLLM::EngineCore"
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_vllm_process_with_its_engine_is_no_left_over():
    with subprocess.Popen(["bash", "-c", "exec -a VLLM::Worker_TP0 sleep 600"]) as child:
        try:
            deadline = time.monotonic() + 200
            while (
                psutil.Process(child.pid).cmdline()[:1] != ["VLLM::Worker_TP0"]
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            orphans, _ = vllm_orphans()
            assert child.pid not in orphans
        finally:
            child.kill()
