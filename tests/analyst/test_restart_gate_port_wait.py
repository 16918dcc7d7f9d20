"""A server's address before the next start: real sockets, and who holds them."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from oomguard.analyst import restart_gate
from oomguard.analyst.restart_gate import is_taken, remove_left_socket, wait_until_free
from oomguard.engines.server import ListenAddress

HOLDER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
held = socket.socket(family)
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
held.bind((sys.argv[1], 0))
held.listen()
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


def never() -> bool:
    return False


def listening(host: str = "127.0.0.1", family: int = socket.AF_INET) -> socket.socket:
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    held.listen()
    return held


def port_of(held: socket.socket) -> int:
    return held.getsockname()[1]


@pytest.fixture
def unix_path() -> Path:
    """A path short enough for a Unix socket."""
    path = Path("/tmp") / f"oomguard-test-{os.getpid()}-{time.monotonic_ns()}.sock"
    yield path
    path.unlink(missing_ok=True)


def test_a_free_port_is_waited_for_no_moment():
    with listening() as held:
        port = port_of(held)
    assert not is_taken(ListenAddress("127.0.0.1", port))
    assert wait_until_free(ListenAddress("127.0.0.1", port), never, limit_s=0) is None


@pytest.mark.parametrize(("theirs", "ours"), [("127.0.0.1", ""), ("0.0.0.0", "localhost")])
def test_listening_port_is_taken_and_its_holder_named(theirs, ours):
    with listening(theirs) as held:
        told = wait_until_free(ListenAddress(ours, port_of(held)), never, limit_s=0)
    assert told is not None
    assert told.startswith(f"pid {os.getpid()} (")
    assert "python" in told


def test_a_listener_at_another_address_is_in_nobody_s_way():
    with listening("127.0.0.1") as held:
        assert not is_taken(ListenAddress("127.0.0.2", port_of(held)))


def test_a_server_that_would_share_its_port_holds_it():
    """vLLM with several API servers binds with SO_REUSEPORT: one that was left would get a part of the requests."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        port = int(process.stdout.readline())
        told = wait_until_free(ListenAddress("127.0.0.1", port), never, limit_s=0)
        process.communicate()
    assert told is not None
    assert f"pid {process.pid} (" in told


def test_a_port_that_is_let_go_in_time_is_waited_for():
    held = listening()
    port = port_of(held)
    threading.Timer(0.3, held.close).start()
    assert wait_until_free(ListenAddress("127.0.0.1", port), never, limit_s=60) is None


def test_a_stop_ends_the_wait():
    stopped = threading.Event()
    threading.Timer(0.1, stopped.set).start()
    began_s = time.monotonic()
    with listening() as held:
        assert (
            wait_until_free(ListenAddress("127.0.0.1", port_of(held)), stopped.is_set, limit_s=3600)
            is None
        )
    assert time.monotonic() - began_s < 60


def test_unbindable_for_other_reasons_is_left_to_the_engine():
    assert not is_taken(ListenAddress("192.0.2.1", 8000))  # no address of ours
    assert not is_taken(ListenAddress("no.such.host.invalid", 8000))
    assert not is_taken(ListenAddress("ä" * 300, 8000))


def test_a_holder_of_another_user_is_said_to_be_not_ours_to_read(monkeypatch):
    monkeypatch.setattr(restart_gate, "processes_with_open", lambda _wanted: set())
    with listening() as held:
        address = ListenAddress("127.0.0.1", port_of(held))
        monkeypatch.setattr(restart_gate.os, "geteuid", lambda: os.getuid() + 1)
        assert "which this user cannot inspect" in restart_gate.describe_listeners(address)
        assert "a process of user " in restart_gate.describe_listeners(address)


def test_the_secrets_of_a_holder_are_masked():
    command = [sys.executable, "-c", HOLDER, "127.0.0.1", "--api-key", "Hunter2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        told = wait_until_free(
            ListenAddress("127.0.0.1", int(process.stdout.readline())), never, limit_s=0
        )
        process.communicate()
    assert "Hunter2" not in told


def test_listening_unix_socket_is_taken_and_not_removed(unix_path):
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(unix_path))
        held.listen()
        assert not remove_left_socket(str(unix_path))
        told = wait_until_free(ListenAddress(path=str(unix_path)), never, limit_s=0)
    assert told is not None
    assert told.startswith(f"pid {os.getpid()} (")
    assert stat.S_ISSOCK(unix_path.lstat().st_mode)


def test_dead_unix_socket_is_reported_and_can_be_removed(unix_path):
    with socket.socket(socket.AF_UNIX) as held:
        held.bind(str(unix_path))
    address = ListenAddress(path=str(unix_path))
    assert "the file of an old socket is still there" in wait_until_free(address, never, limit_s=0)
    assert remove_left_socket(str(unix_path))
    assert wait_until_free(address, never, limit_s=0) is None
    assert not remove_left_socket(str(unix_path))


def test_a_file_that_is_no_socket_is_never_removed(tmp_path):
    (tmp_path / "notes").write_text("mine")
    assert not remove_left_socket(str(tmp_path / "notes"))
    assert (
        wait_until_free(ListenAddress(path=str(tmp_path / "notes")), never, limit_s=0)
        == "a file that is not a socket"
    )
    assert (tmp_path / "notes").read_text() == "mine"
