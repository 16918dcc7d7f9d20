"""The devices' memory between two attempts; the driver's answers are given, the processes that it names are real."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from oomguard import retry
from oomguard.probe import nvml
from oomguard.probe.nvml import Device
from oomguard.retry import wait_until_free

GIB = 2**30


def device(free_gib, by_pid=None, index=0):
    return Device(index, "GPU", 24 * GIB, None if free_gib is None else int(free_gib * GIB), by_pid)


@pytest.fixture
def answers(monkeypatch):
    """What the driver says, one answer a call, the last one from then on."""
    told = []
    monkeypatch.setattr(nvml, "devices", lambda: told.pop(0) if len(told) > 1 else told[0])
    monkeypatch.setattr(retry, "FREE_POLL_S", 0.001)
    return told


def never():
    return False


def wait(before, **options):
    return wait_until_free(
        {d.index: d for d in before}, never, **{"limit_s": 0, "host_pids": True, **options}
    )


def test_memory_that_comes_back_late_is_waited_for(answers):
    answers += [(device(4.0),), (device(12.0),), (device(19.9),)]
    assert wait([device(20.0)], limit_s=60) is None
    assert len(answers) == 1


def test_memory_still_in_use_is_reported_with_its_process(answers):
    command = [
        sys.executable,
        "-c",
        "import sys; print('READY', flush=True); sys.stdin.read()",
        "neighbour",
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "READY\n"  # before that /proc may still show no command
        answers.append((device(14.0, {process.pid: 6 * GIB, os.getppid(): GIB}),))
        told = wait([device(20.0, {os.getppid(): GIB})])
        process.communicate()
    assert told.startswith(f"GPU 0: 6.00 GiB still held, by pid {process.pid} (")
    assert "neighbour) with 6.00 GiB" in told
    assert f"pid {os.getppid()} " not in told  # it held as much before


def test_the_largest_come_first_and_the_rest_are_counted(answers):
    answers.append((device(10.0, {pid: pid * GIB for pid in range(999_000_001, 999_000_006)}),))
    told = wait([device(20.0)])
    assert told.index("pid 999000005") < told.index("pid 999000004")
    assert told.endswith("2 more")


@pytest.mark.parametrize(
    ("by_pid", "host_pids", "said"),
    [
        (None, True, "by processes that the driver does not show"),
        ({}, True, "by no process that the driver shows"),
        ({41: GIB}, False, "by a process outside this container's view"),
        ({41: GIB, 42: None}, None, "by 2 processes outside this container's view"),
    ],
)
def test_a_holder_that_cannot_be_known_is_said_to_be_that(
    answers, by_pid, host_pids, said, monkeypatch
):
    monkeypatch.setattr(nvml, "sees_host_pids", lambda: host_pids)
    answers.append((device(14.0, by_pid),))
    assert wait([device(20.0, {})], host_pids=host_pids) == f"GPU 0: 6.00 GiB still held, {said}"


def test_a_size_that_the_driver_hides_is_left_out(answers):
    answers.append((device(14.0, {999_000_001: None}),))
    assert wait([device(20.0, {})]) == "GPU 0: 6.00 GiB still held, by pid 999000001"


@pytest.mark.parametrize("now", [None, (), (device(None),), (device(1.0, index=1),)])
def test_where_nothing_is_known_nothing_is_waited_for(answers, now):
    answers.append(now)
    assert wait([device(20.0)], limit_s=3600) is None


def test_a_stop_ends_the_wait(answers):
    answers.append((device(1.0),))
    stops = iter([False, False, True])
    assert wait_until_free({0: device(20.0)}, lambda: next(stops), limit_s=3600) is None


def test_a_long_wait_is_announced_once_with_the_memory_in_use(answers, monkeypatch):
    monkeypatch.setattr(retry, "ANNOUNCE_AFTER_S", 0.01)
    answers.append((device(14.0),))
    with capture_logs() as events:
        wait([device(20.0)], limit_s=0.05)
    (event,) = [entry for entry in events if entry["event"].startswith("Waiting until")]
    assert event["still_held"] == "GPU 0: 6.00 GiB"
