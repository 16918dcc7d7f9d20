"""What the host has free for a new process: the kernel's estimate, within the limits of its group."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oomguard.probe import host
from oomguard.probe.host import read_available_bytes, read_data_limit_bytes, read_total_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(host, "address_space_limit_bytes", lambda: None)
    monkeypatch.setattr(host, "data_limit_bytes", lambda: math.inf)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 25165824 kB\nMemAvailable:   10485760 kB\n")
    return tmp_path


def test_it_is_the_kernel_s_own_estimate(root):
    assert read_available_bytes(root) == 10 * GIB


def test_a_group_s_limit_counts_where_it_leaves_less(root):
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 * GIB))
    (group / "memory.current").write_text(str(3 * GIB))
    assert read_available_bytes(root) == GIB


def test_a_limit_of_the_address_space_counts_where_it_is_less(root, monkeypatch):
    monkeypatch.setattr(host, "address_space_limit_bytes", lambda: float(2 * GIB))
    assert read_available_bytes(root) == 2 * GIB


def test_a_limit_of_private_memory_is_told_by_itself(root, monkeypatch):
    assert read_data_limit_bytes() is None
    monkeypatch.setattr(host, "data_limit_bytes", lambda: float(2 * GIB))
    assert read_data_limit_bytes() == 2 * GIB
    assert read_available_bytes(root) == 10 * GIB


def test_it_is_unknown_where_the_kernel_tells_nothing(root):
    (root / "proc/meminfo").unlink()
    assert read_available_bytes(root) is None


def test_a_group_s_limit_is_the_total_for_those_in_it(root):
    assert read_total_bytes(root) == 24 * GIB
    (root / "proc/self/cgroup").write_text("0::/pod\n")
    group = root / "sys/fs/cgroup/pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 * GIB))
    (group / "memory.current").write_text("0")
    assert read_total_bytes(root) == 4 * GIB
