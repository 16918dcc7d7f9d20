"""systemd's protocol on a socket: what a unit of Type=notify with a watchdog would hear."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from oomguard.cluster.health import Health, SystemdNotifier, SystemdSocket, take_systemd_socket
from oomguard.engines.command import Launch
from support.each import each
from support.supervising import wait_for


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)
        self.heard: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        while True:
            try:
                text = self._socket.recv(4096).decode()
            except BlockingIOError:
                return self.heard
            self.heard.append(dict(line.split("=", 1) for line in text.splitlines()))

    def named(self, name: str) -> list[str]:
        return [message[name] for message in self.listen() if name in message]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager():
    found = Manager(f"@oomguard-notify-{os.getpid()}-{time.monotonic_ns()}")
    yield found
    found.close()


def test_ready_server_feeds_the_watchdog_while_healthy(serve, manager):
    served = serve(
        "--hang-after", "2", env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"}
    )
    assert wait_for(lambda: manager.named("READY"))
    assert manager.named("READY") == ["1"]
    assert manager.named("EXTEND_TIMEOUT_USEC")  # it had time while it started
    assert wait_for(lambda: "serving" in manager.named("STATUS"))
    told = len(manager.named("WATCHDOG"))
    assert wait_for(lambda: len(manager.named("WATCHDOG")) > told + 2)
    served.order("stuck")
    served.request()
    assert wait_for(lambda: any("the server hangs" in status for status in manager.named("STATUS")))
    told = len(manager.named("WATCHDOG"))
    time.sleep(1.5)
    assert len(manager.named("WATCHDOG")) <= told + 1  # one may have been on its way
    served.forget("stuck")
    assert wait_for(lambda: len(manager.named("WATCHDOG")) > told + 2)
    served.end()
    assert manager.named("STOPPING")


def test_the_server_itself_inherits_none_of_it(serve, manager):
    served = serve(
        env={"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    )
    served.wait_for("the server answers")
    (pid,) = [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and _is_server(p, served.port)
    ]
    assert not {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"} & {
        entry.split(b"=", 1)[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    }
    assert wait_for(lambda: manager.named("READY"))
    assert not manager.named("WATCHDOG")  # it is asked of another process
    served.process.send_signal(signal.SIGTERM)


def _is_server(place: Path, port: int) -> bool:
    try:
        words = (place / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return (
        len(words) > 2
        and words[1].endswith(b"/vllm")
        and words[2] == b"serve"
        and str(port).encode() in words
    )


@each("value", ["", "vsock:2:1", "relative"])
def test_an_address_that_is_no_socket_of_unix_is_nobody(value):
    environ = {"NOTIFY_SOCKET": value, "WATCHDOG_USEC": "1"}
    assert take_systemd_socket(environ) is None
    assert environ == {}


def test_a_manager_that_has_gone_harms_nothing():
    SystemdSocket("/no/such/socket").send(READY=1)


def test_stop_is_reported_at_once_not_at_the_servers_end(serve, manager):
    served = serve(flags=("--stop-s", "4"), env={"NOTIFY_SOCKET": manager.address})
    assert wait_for(lambda: "serving" in manager.named("STATUS"))
    served.process.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert wait_for(lambda: manager.named("STOPPING"), 3)
    assert time.monotonic() - began_s < 3
    assert served.process.poll() is None
    assert manager.named("STATUS")[-1] == "stopping"
    served.process.wait(60)
    assert manager.named("STATUS")[-1].startswith("ended")


def test_failed_check_keeps_the_watchdog_of_a_healthy_server(manager, monkeypatch):
    health = Health("vllm", 0.0, lambda _: None, {}, is_ready=True)
    told = SystemdNotifier(
        SystemdSocket(
            f"\0{manager.address[1:]}" if manager.address.startswith("@") else manager.address, 0.1
        ),
        health,
        lambda: False,
    )
    monkeypatch.setattr(told, "_tick", lambda: 1 / 0)
    told.began(1, Launch(("vllm", "serve", "m")), None)
    assert wait_for(lambda: len(manager.named("WATCHDOG")) > 3)
    told.close(0)
    assert manager.named("STOPPING") == ["1"]
