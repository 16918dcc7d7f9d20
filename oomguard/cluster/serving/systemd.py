"""Notify systemd when the server is ready, alive or stopping (sd_notify(3)).

The server itself knows nothing about systemd. oomguard stays the main process of the unit. It
removes the variables of systemd's socket, so that no child process answers instead.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Final

from oomguard.analyst.link import current_link
from oomguard.cluster.serving.health import Health, cpu_of
from oomguard.core.incident import Attempt
from oomguard.core.log import get_logger
from oomguard.core.process import pid_of_run
from oomguard.engines.command import Launch
from oomguard.supervisor import tree

_EVERY_S: Final = 5.0
_USEC: Final = 1_000_000
# A start that works, by CPU time or reading, gets this much more time again and again.
_EXTENDED_S: Final = 60.0
# A start whose processes did nothing for this long gets no more time.
_STILL_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class SystemdSocket:
    """Hold the socket of the service manager.

    Attributes:
        address: a path, or an abstract name that begins with NUL.
        watchdog_s: the interval of the watchdog in seconds, or None without a watchdog.
    """

    address: str
    watchdog_s: float | None = None

    def send(self, **what: object) -> None:
        """Send one message; ignore a missing receiver."""
        text = "\n".join(
            f"{name}={str(value).replace(chr(10), ' ')}" for name, value in what.items()
        )
        link = current_link()
        if link is not None:  # systemd accepts messages only from the main process of the service
            link.say("notify", address=self.address, text=text)
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(text.encode("utf-8", "replace"), self.address)


def take_systemd_socket(environ: MutableMapping[str, str]) -> SystemdSocket | None:
    """Remove the variables of systemd's socket and return the socket, or None without one."""
    address = environ.pop("NOTIFY_SOCKET", "")
    usec = environ.pop("WATCHDOG_USEC", "")
    pid = environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    is_ours = usec.isdecimal() and int(usec) > 0 and pid in {"", str(pid_of_run())}
    if address.startswith("@"):
        path = f"\0{address[1:]}"
    else:
        path = address
    return SystemdSocket(path, int(usec) / _USEC if is_ours else None)


class SystemdNotifier:
    """Notify systemd about one run, from a thread; implements a companion.

    Args:
        systemd: the socket.
        health: the health monitor of the server.
        stopped: returns whether the user stopped the run.
    """

    def __init__(self, systemd: SystemdSocket, health: Health, stopped: Callable[[], bool]) -> None:
        self._systemd = systemd
        self._health = health
        self._stopped = stopped
        self._every_s = min(_EVERY_S, (systemd.watchdog_s or 2 * _EVERY_S) / 2)
        self._over = threading.Event()
        self._pid: int | None = None
        self._did = (0.0, 0)
        self._did_s = 0.0
        self._was_ready = self._was_stopped = self._has_failed = False
        self._lock = threading.Lock()
        self._status = ""
        self._thread: threading.Thread | None = None

    def began(self, number: int, _launch: Launch, pid: int | None) -> None:
        """Report that an attempt has begun."""
        self._pid = pid
        self._did = (0.0, 0)
        self._did_s = time.monotonic()
        self._say("starting" if number == 1 else f"restarting, attempt {number}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="oomguard-systemd", daemon=True)
            self._thread.start()

    def ended(self, attempt: Attempt) -> None:
        """Report how an attempt ended; a stop by the user is not a failure."""
        self._pid = None
        if not attempt.succeeded and not self._was_stopped:
            self._say(f"attempt {attempt.number} failed: {attempt.error or 'out of memory'}")

    def stopping(self) -> None:
        """Report once that the user stopped the run; any thread may call this."""
        with self._lock:
            is_first = not self._was_stopped
            self._was_stopped = True
            if is_first:
                self._systemd.send(STOPPING=1, STATUS="stopping")

    def close(self, status: int) -> None:
        """Report that the run ends."""
        self._over.set()
        self._systemd.send(STOPPING=1, STATUS=f"ended with status {status}" if status else "ended")

    def _run(self) -> None:
        while not self._over.wait(self._every_s if self._was_ready else min(1.0, self._every_s)):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001
                # No problem is known, and without a message the watchdog would end the server.
                if not self._has_failed:
                    get_logger().warning(
                        "systemd gets fewer messages", reason=f"{type(error).__name__}: {error}"
                    )
                self._has_failed = True
                self._pulse()

    def _tick(self) -> None:
        if self._stopped():
            self.stopping()
            self._pulse()
            return
        health = self._health
        if health.is_ready and health.wrong is None:
            if not self._was_ready:
                self._was_ready = True
                self._systemd.send(READY=1)
            self._say("serving")
        elif health.wrong is not None:
            self._say(health.wrong)
            return  # if oomguard sends nothing, systemd's watchdog acts
        elif not self._goes_on():
            return
        elif not self._was_ready:
            self._systemd.send(EXTEND_TIMEOUT_USEC=int(_EXTENDED_S * _USEC))
        self._pulse()

    def _pulse(self) -> None:
        if self._systemd.watchdog_s is not None:
            self._systemd.send(WATCHDOG=1)

    def _say(self, status: str) -> None:
        with self._lock:
            if status != self._status and not self._was_stopped:
                self._status = status
                self._systemd.send(STATUS=status)

    def _goes_on(self) -> bool:
        """Return whether a start makes progress: its processes use CPU or read, or none exists
        yet.
        """
        now_s = time.monotonic()
        if self._pid is None:
            return True
        pids = [self._pid, *tree.descendants(self._pid)]
        did = sum(map(cpu_of, pids)), sum(map(tree.read_bytes, pids))
        if did[0] - self._did[0] >= 0.02 * self._every_s or did[1] != self._did[1]:
            self._did = did
            self._did_s = now_s
        return now_s - self._did_s < _STILL_S
