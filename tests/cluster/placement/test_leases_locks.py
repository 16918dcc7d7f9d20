"""A lock that the kernel releases with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard.cluster.placement.leases import LockFile

HOLD = """
import sys
from pathlib import Path
from oomguard.cluster.placement.leases import LockFile
lock = LockFile(Path(sys.argv[1]))
print(lock.take(), flush=True)
sys.stdin.read()
"""


def test_who_holds_it_is_alone_until_it_gives_it_back(tmp_path):
    one, other = LockFile(tmp_path / "a"), LockFile(tmp_path / "a")
    assert one.take()
    assert not other.take()
    one.close()
    assert other.take()
    other.close()


def test_a_look_takes_nothing_and_sees_no_lock_of_its_own(tmp_path):
    one, other = LockFile(tmp_path / "a"), LockFile(tmp_path / "a")
    assert not other.is_taken()
    one.take()
    assert other.is_taken()
    assert not one.is_taken()
    one.close()
    assert not other.is_taken()
    other.close()


def test_the_kernel_releases_it_within_a_second_of_a_kill(tmp_path):
    path = tmp_path / "a"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        ours = LockFile(path)
        assert not ours.take()
        holder.send_signal(signal.SIGKILL)
        began_s = time.monotonic()
        assert ours.take_within(30)
        assert time.monotonic() - began_s < 1
        ours.close()


def test_what_was_told_is_read_and_what_is_no_json_is_nothing(tmp_path):
    lock = LockFile(tmp_path / "a")
    assert lock.read() == {}
    lock.write({"pid": 7, "command": "a long one"})
    lock.write({"pid": 8})
    assert lock.read() == {"pid": 8}
    (tmp_path / "a").write_text('["not", "an object"]')
    assert lock.read() == {}
    lock.close()


def test_its_file_can_be_opened_by_other_users(tmp_path):
    before = os.umask(0o077)
    try:
        LockFile(tmp_path / "a").close()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666


def planted_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    "plant", [planted_link, os.mkfifo, Path.mkdir], ids=["link", "fifo", "folder"]
)
def test_non_plain_file_is_refused_and_nothing_is_made(tmp_path, plant):
    plant(tmp_path / "a")
    with pytest.raises(OSError, match=r"symbolic links|regular file|directory"):
        LockFile(tmp_path / "a").take()
    assert not (tmp_path / "elsewhere").exists()
