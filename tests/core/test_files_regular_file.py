"""Only regular files are read, up to their limit: nothing that a stranger puts in their place is waited for."""

from __future__ import annotations

import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from oomguard.core.files import read_regular


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def linked_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("queue"))
    path.symlink_to("queue")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(
            1 << 50 if os.uname().sysname == "Linux" and _sparse(path.parent) else 1 << 30
        )


def _sparse(folder: Path) -> bool:
    try:
        with (folder / "probe").open("wb") as file:
            file.truncate(1 << 50)
    except OSError:
        return False
    finally:
        (folder / "probe").unlink()
    return True


KINDS: dict[Callable[[Path], None], str] = {
    fifo: "is a FIFO, not a file",
    folder: "is a folder, not a file",
    unix_socket: "is a socket, not a file",
    endless: "is a device, not a file",
    terminal: "is a device, not a file",
    linked_fifo: "is a FIFO, not a file",
    loop: "symbolic links",
    huge: "is larger than 1000 bytes",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose path is short enough for a socket."""
    monkeypatch.chdir(tmp_path)
    return Path()


@pytest.mark.parametrize(("make", "said"), KINDS.items(), ids=[make.__name__ for make in KINDS])
def test_what_is_no_file_or_too_large_is_refused_at_once(make, said, here):
    make(here / "input")

    with pytest.raises(OSError, match=said):
        read_regular(here / "input", 1000)


def test_a_file_of_just_the_limit_is_read(tmp_path):
    (tmp_path / "input").write_bytes(b"x" * 1000)

    assert len(read_regular(tmp_path / "input", 1000)) == 1000


def test_no_more_is_allocated_than_the_file_has(tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert len(read_regular(small, 1 << 28)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "blob").write_bytes(b"x")
    (tmp_path / "input").symlink_to("blob")

    assert read_regular(tmp_path / "input", 1000) == b"x"


def test_a_file_that_hides_its_size_is_read_up_to_the_limit():
    with pytest.raises(OSError, match="is larger than 3 bytes"):
        read_regular("/proc/self/status", 3)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "nowhere"])
def test_name_that_cannot_be_opened_is_a_system_error(name):
    with pytest.raises(OSError):  # noqa: PT011 - each system has its own words
        read_regular(name, 1000)
