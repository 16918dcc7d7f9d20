"""Leases of devices, and folders in which none can be held."""

from __future__ import annotations

import os
from pathlib import Path

from oomguard.cluster.placement.leases import Lease, LeaseFolder, file_system_of
from support.each import each


def test_lease_names_its_holder_and_ends_when_returned(tmp_path):
    ours, theirs = LeaseFolder(tmp_path / "leases"), LeaseFolder(tmp_path / "leases")
    locks = ours.take(["GPU-a", "GPU-b"], "vllm serve m", "start")
    assert locks is not None

    (told,) = {lease.command for lease in theirs.holders(["GPU-a", "GPU-b", "GPU-c"]).values()}
    assert told == "vllm serve m"
    assert theirs.holders(["GPU-a"])["GPU-a"].pid == os.getpid()
    for lock in locks.values():
        lock.close()
    assert theirs.holders(["GPU-a", "GPU-b"]) == {}


def test_either_all_devices_are_leased_or_none(tmp_path):
    ours, theirs = LeaseFolder(tmp_path), LeaseFolder(tmp_path)
    held = theirs.take(["GPU-b"], "theirs", "job")
    assert held is not None
    assert ours.take(["GPU-a", "GPU-b"], "ours", "job") is None
    assert set(theirs.holders(["GPU-a", "GPU-b"])) == {"GPU-b"}
    held["GPU-b"].close()


def test_folder_is_for_all_users_without_removing_rights(tmp_path):
    LeaseFolder(tmp_path / "leases")
    assert (tmp_path / "leases").stat().st_mode & 0o7777 == 0o1777


def test_a_name_cannot_lead_out_of_the_folder(tmp_path):
    assert LeaseFolder(tmp_path / "leases").file("../../etc/x").parent == tmp_path / "leases"


def test_who_only_looks_makes_nothing(tmp_path):
    folder = LeaseFolder(tmp_path / "leases", makes=False)
    assert (folder.why_off, folder.holders(["GPU-a"])) == (None, {})
    assert not (tmp_path / "leases").exists()


def test_unwritable_folder_is_reported_and_no_lease_is_taken(tmp_path):
    (tmp_path / "file").touch()
    folder = LeaseFolder(tmp_path / "file" / "leases")
    assert "Not a directory" in (folder.why_off or "")
    assert folder.take(["GPU-a"], "ours", "job") == {}
    assert folder.holders(["GPU-a"]) == {}


def test_a_read_only_file_system_is_told():
    folder = LeaseFolder(Path("/proc/oomguard-leases"))
    assert (folder.why_off or "").startswith("/proc/oomguard-leases: ")


def test_a_link_is_no_folder_of_ours(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "leases").symlink_to(tmp_path / "real")
    assert "is not a folder" in (LeaseFolder(tmp_path / "leases").why_off or "")


def test_a_folder_where_anybody_may_remove_a_lock_holds_none(tmp_path):
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o777)
    assert "chmod +t" in (LeaseFolder(tmp_path / "leases").why_off or "")


def mounts(tmp_path: Path, kind: str) -> Path:
    device = tmp_path.stat().st_dev
    path = tmp_path / "mountinfo"
    path.write_text(
        "22 1 0:5 / /proc rw - proc proc rw\n"
        f"31 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {kind} server:/export rw\n"
    )
    return path


@each("kind", ["nfs4", "ext4"])
def test_the_kind_of_a_file_system_is_read_from_the_mounts(tmp_path, kind):
    assert file_system_of(tmp_path, mounts(tmp_path, kind)) == kind


def test_locks_that_a_server_keeps_are_not_relied_on(tmp_path, monkeypatch):
    path = mounts(tmp_path, "nfs4")
    monkeypatch.setattr("oomguard.cluster.placement.leases.MOUNTS", path)
    assert "is on nfs4, a network file system whose locks are not reliable" in (
        LeaseFolder(tmp_path / "leases").why_off or ""
    )


@each("told", [{}, {"pid": "x", "command": 7, "since_s": "now", "until": "ever"}])
def test_what_a_stranger_wrote_into_a_lock_is_taken_for_nothing(told):
    assert Lease.from_record(told) == Lease(None, None, None, None)
