"""Reads of the host on trees like those of real machines: cgroup v1 and v2, WSL, containers, NUMA, exit statuses."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomguard.probe.host import (
    Cgroup,
    address_space_limit_bytes,
    containers,
    data_limit_bytes,
    killed_for_memory,
    numa_nodes,
    nvidia_driver,
    read_cgroup,
    signal_of,
    wsl_version,
)

GIB = 2**30


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_cgroup_v2_limit_is_read_with_usage_and_kill_count(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", f"{3 * GIB}\n")
    write(
        tmp_path,
        "sys/fs/cgroup/memory.events",
        "low 0\nhigh 0\nmax 41\noom 2\noom_kill 2\noom_group_kill 0\n",
    )

    assert read_cgroup(tmp_path) == Cgroup(2, True, 8 * GIB, 3 * GIB, 2)


def test_the_least_limit_of_the_groups_above_is_the_one_in_force(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job.scope\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", f"{4 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job.scope/memory.max", f"{16 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job.scope/memory.current", "1024\n")

    assert read_cgroup(tmp_path) == Cgroup(2, True, 4 * GIB, 1024, None)


def test_max_is_no_limit_and_not_an_unknown_one(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")

    assert read_cgroup(tmp_path) == Cgroup(2, False, None, None, None)


def test_a_limit_that_cannot_be_read_is_unknown(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "4096\n")

    assert read_cgroup(tmp_path) == Cgroup(2, None, None, 4096, None)


def test_a_v1_limit_is_read(tmp_path):
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "77\n")
    write(
        tmp_path,
        "sys/fs/cgroup/memory/docker/abc/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )

    assert read_cgroup(tmp_path) == Cgroup(1, True, 2 * GIB, 77, 3)


def test_the_v1_number_for_no_limit_is_no_limit(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")

    assert read_cgroup(tmp_path) == Cgroup(1, False, None, None, None)


def test_host_path_inside_a_container_falls_back_to_the_mount(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/kubepods/pod1/abc\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB}\n")

    assert read_cgroup(tmp_path) == Cgroup(1, True, GIB, None, None)


def test_v1_without_its_mount_is_read_from_v2(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{GIB}\n")

    assert read_cgroup(tmp_path) == Cgroup(2, True, GIB, None, None)


@pytest.mark.parametrize(
    "listed", [None, "", "0::/\n", "nonsense", "4:memory:/x\n", "0::/../../../../etc\n"]
)
def test_no_memory_controller_is_unknown(tmp_path, listed):
    if listed is not None:
        write(tmp_path, "proc/self/cgroup", listed)

    assert read_cgroup(tmp_path) is None


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(listed=st.text(max_size=60), limit=st.binary(max_size=30), events=st.binary(max_size=60))
def test_limits_are_never_negative_whatever_the_files_hold(tmp_path, listed, limit, events):
    write(
        tmp_path,
        "proc/self/cgroup",
        f"0::/\n{listed}".replace("\0", "").encode("utf-8", "replace").decode(),
    )
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_bytes(limit)
    (tmp_path / "sys/fs/cgroup/memory.events").write_bytes(events)

    found = read_cgroup(tmp_path)
    assert found is None or found.limit_bytes is None or found.limit_bytes >= 0
    assert found is None or bool(found.limited) == (found.limit_bytes is not None)


def test_this_machine_s_own_files_are_read_without_an_error():
    read_cgroup()
    containers()
    numa_nodes()

    assert wsl_version() in {0, 1, 2, None}


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x) (gcc)", 2),
        ("Linux version 4.19.104-microsoft-standard (oe-user@oe-host)", 2),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", 1),
        ("Linux version 6.8.0-49-generic (buildd@lcy02)", 0),
    ],
)
def test_wsl_is_known_by_the_kernel_s_name(tmp_path, release, version):
    write(tmp_path, "proc/version", release)

    assert wsl_version(tmp_path) == version


def test_custom_wsl2_kernel_is_known_by_its_windows_device(tmp_path):
    write(tmp_path, "proc/version", "Linux version 6.12.0-mine")
    write(tmp_path, "proc/sys/fs/binfmt_misc/WSLInterop", "enabled")

    assert wsl_version(tmp_path) == 2


def test_without_a_kernel_s_name_wsl_is_unknown(tmp_path):
    assert wsl_version(tmp_path) is None


def test_containers_are_known_by_files_variables_and_groups(tmp_path):
    assert containers(tmp_path, {}) == ()
    assert containers(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == ("Kubernetes",)

    write(tmp_path, ".dockerenv", "")
    write(
        tmp_path,
        "proc/1/cgroup",
        "4:memory:/kubepods/besteffort/pod1\n1:name=systemd:/docker/abc\n",
    )
    assert containers(tmp_path, {}) == ("Docker", "Kubernetes")


def test_numa_nodes_are_read_in_order_and_silent_ones_unknown(tmp_path):
    write(tmp_path, "sys/devices/system/node/node10/meminfo", "")
    write(
        tmp_path,
        "sys/devices/system/node/node2/meminfo",
        "Node 2 MemTotal:  2048 kB\nNode 2 MemFree:   1024 kB\n",
    )
    write(tmp_path, "sys/devices/system/node/online", "2,10")

    second, tenth = numa_nodes(tmp_path)
    assert (second.number, second.total_bytes, second.free_bytes) == (2, 2**21, 2**20)
    assert (tenth.number, tenth.total_bytes, tenth.free_bytes) == (10, None, None)


def test_no_list_of_nodes_is_unknown(tmp_path):
    assert numa_nodes(tmp_path) is None
    write(tmp_path, "sys/devices/system/node/online", "0")
    assert numa_nodes(tmp_path) is None


def test_the_driver_s_version_is_read_from_the_kernel(tmp_path):
    assert nvidia_driver(tmp_path) is None
    write(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n",
    )
    assert nvidia_driver(tmp_path) == "570.86.15"


@pytest.mark.parametrize(
    ("limit", "read"),
    [(resource.RLIMIT_AS, address_space_limit_bytes), (resource.RLIMIT_DATA, data_limit_bytes)],
    ids=["addresses", "data"],
)
def test_a_limit_of_memory_is_this_process_s(limit, read):
    size = 64 * GIB
    code = f"from oomguard.probe.host import {read.__name__}; print({read.__name__}())"
    bounded = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(limit, (size, size)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert bounded.stdout.strip() == str(size)
    if resource.getrlimit(limit)[0] == resource.RLIM_INFINITY:
        assert read() == math.inf


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (137, "SIGKILL"),
        (-9, "SIGKILL"),
        (139, "SIGSEGV"),
        (143, "SIGTERM"),
        (0, None),
        (1, None),
        (255, None),
    ],
)
def test_an_exit_status_stands_for_a_signal_or_for_none(status, name):
    assert signal_of(status) == name


@pytest.mark.parametrize(
    ("status", "before", "after", "answer"),
    [
        (137, 4, 5, True),
        (-9, 0, 2, True),
        (137, 4, 4, False),
        (137, None, 5, None),
        (137, 4, None, None),
        (1, 4, 5, False),
    ],
)
def test_kill_is_the_kernels_only_if_the_groups_count_rose(status, before, after, answer):
    groups = [Cgroup(2, False, None, None, count) for count in (before, after)]

    assert killed_for_memory(status, *groups) is answer


def test_without_a_group_nothing_tells_who_killed():
    assert killed_for_memory(137, None, None) is None
