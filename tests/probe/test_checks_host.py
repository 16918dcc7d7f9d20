"""The host's limits as checks: what is missing is unknown, never zero and never a problem."""

from __future__ import annotations

import math

import pytest

from oomguard.probe.checks import (
    address_space_check,
    cgroup_check,
    data_check,
    host_checks,
    memory_checks,
    numa_check,
    shm_check,
    wsl_check,
)
from oomguard.probe.host import Cgroup

GIB = 2**30


def test_empty_tree_has_no_problem_and_no_zero(tmp_path):
    checks = {check.id: check for check in host_checks({}, tmp_path)}

    assert {
        name: checks[name].status for name in ("wsl", "cgroup", "shm", "numa")
    } == dict.fromkeys(("wsl", "cgroup", "shm", "numa"), "unknown")
    assert not any("0.00" in checks[name].text for name in ("wsl", "cgroup", "shm", "numa"))


def test_a_limit_is_shown_with_its_use_and_the_kernel_s_kills():
    check = cgroup_check(Cgroup(2, True, 8 * GIB, 3 * GIB, 0))

    assert (check.status, check.text) == (
        "ok",
        "cgroup v2: 8.00 GiB is the limit, 3.00 GiB used, oom_kill count 0",
    )


def test_kills_in_the_group_are_a_problem():
    assert cgroup_check(Cgroup(2, True, 8 * GIB, 3 * GIB, 2)).status == "problem"


def test_nearly_full_group_is_unknown_because_of_page_cache():
    check = cgroup_check(Cgroup(2, True, 8 * GIB, int(7.9 * GIB), 0))

    assert check.status == "unknown"
    assert check.advice


def test_no_limit_and_an_unknown_limit_are_told_apart():
    assert "no memory limit" in cgroup_check(Cgroup(2, False, None, None, None)).text
    assert "the limit is unknown" in cgroup_check(Cgroup(2, None, None, 1, None)).text
    assert cgroup_check(Cgroup(2, None, None, 1, None)).status == "unknown"


def test_this_host_s_memory_is_told():
    assert [check.text.split(":")[0] for check in memory_checks()] == ["host memory", "swap"]


def test_shared_memory_of_this_host_is_measured(tmp_path):
    (tmp_path / "dev/shm").mkdir(parents=True)

    assert shm_check(tmp_path, ()).status in {"ok", "problem"}


@pytest.mark.parametrize(("inside", "words"), [((), "--shm-size"), (("Kubernetes",), "emptyDir")])
def test_little_shared_memory_comes_with_the_way_to_more(tmp_path, inside, words):
    (tmp_path / "dev/shm").mkdir(parents=True)
    check = shm_check(tmp_path, inside, small_bytes=math.inf)

    assert check.status == "problem"
    assert words in check.advice


@pytest.mark.parametrize(
    ("check", "limit"), [(address_space_check, "ulimit -v"), (data_check, "ulimit -d")]
)
def test_a_limit_of_memory_is_a_problem_and_none_is_not(check, limit):
    assert check(16 * GIB).status == "problem"
    assert check(16 * GIB).advice == f"{limit} unlimited"
    assert check(math.inf).status == "ok"
    assert check(None).status == "unknown"


@pytest.mark.parametrize(
    ("version", "status"), [(0, "ok"), (1, "ok"), (2, "ok"), (None, "unknown")]
)
def test_wsl_is_told_and_its_absence_too(version, status):
    assert wsl_check(version).status == status
    assert bool(wsl_check(version).advice) is (version in {1, 2})


def test_nodes_are_told_with_their_sizes(tmp_path):
    for number in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {number} MemTotal: {2**21} kB\n")

    assert numa_check(tmp_path).text == "NUMA nodes: node 0 2.00 GiB, node 1 2.00 GiB"
