"""systemd hears when the server is ready, that it goes on, and what it does: the protocol of
sd_notify(3), a datagram a message.

The server knows nothing of it: oomguard stays the unit's main process, and takes the variables that
name systemd's socket out of the environment, so that nothing below answers in its place. Without a
socket nobody is told.
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
from oomguard.core.process_state import pid_of_run
from oomguard.engines.command import Launch
from oomguard.supervisor import tree

_EVERY_S: Final = 5.0
_USEC: Final = 1_000_000
# A start is given this time again and again, while its processes take CPU time or read.
_EXTENDED_S: Final = 60.0
# A start whose processes did nothing for so long is not extended any more.
_STILL_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Systemd:
    """The socket of the service manager.

    Attributes:
        address: a path, or a name in the abstract namespace that begins with NUL.
        watchdog_s: it expects to hear that all is well this often; None: it does not ask.
    """

    address: str
    watchdog_s: float | None = None

    def tell(self, **what: object) -> None:
        """Send one message; nobody may be there any more."""
        text = "\n".join(
            f"{name}={str(value).replace(chr(10), ' ')}" for name, value in what.items()
        )
        link = current_link()
        if link is not None:  # systemd hears nobody but its service's main process
            link.say("notify", address=self.address, text=text)
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(text.encode("utf-8", "replace"), self.address)


def taken_from(environ: MutableMapping[str, str]) -> Systemd | None:
    """Return the socket that the variables name, and take them out; None where they name none."""
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
    return Systemd(path, int(usec) / _USEC if is_ours else None)


class SystemdNotifier:
    """Tells systemd of one run, from a thread, as a companion of the run.

    Args:
        systemd: who is told.
        health: how the server does.
        stopped: whether the user asked to stop.
    """

    def __init__(self, systemd: Systemd, health: Health, stopped: Callable[[], bool]) -> None:
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
        """Tell that an attempt has begun."""
        self._pid = pid
        self._did = (0.0, 0)
        self._did_s = time.monotonic()
        self._say("starting" if number == 1 else f"starting again, attempt {number}")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="oomguard-systemd", daemon=True)
            self._thread.start()

    def ended(self, attempt: Attempt) -> None:
        """Tell how an attempt ended; of one that a stop ended nothing failed."""
        self._pid = None
        if not attempt.succeeded and not self._was_stopped:
            self._say(f"attempt {attempt.number} failed: {attempt.error or 'out of memory'}")

    def stopping(self) -> None:
        """Tell, once and at once, that the user asked to stop: the server may take its time. Called
        from any thread.
        """
        with self._lock:
            is_first = not self._was_stopped
            self._was_stopped = True
            if is_first:
                self._systemd.tell(STOPPING=1, STATUS="stopping")

    def close(self, status: int) -> None:
        """Tell that the run ends."""
        self._over.set()
        self._systemd.tell(STOPPING=1, STATUS=f"ended with status {status}" if status else "ended")

    def _run(self) -> None:
        while not self._over.wait(self._every_s if self._was_ready else min(1.0, self._every_s)):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001
                # nothing is known to be wrong with the server, and silence would end it
                if not self._has_failed:
                    get_logger().warning(
                        "systemd is told less", reason=f"{type(error).__name__}: {error}"
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
                self._systemd.tell(READY=1)
            self._say("serving")
        elif health.wrong is not None:
            self._say(health.wrong)
            return  # systemd's watchdog acts on what is not said
        elif not self._goes_on():
            return
        elif not self._was_ready:
            self._systemd.tell(EXTEND_TIMEOUT_USEC=int(_EXTENDED_S * _USEC))
        self._pulse()

    def _pulse(self) -> None:
        if self._systemd.watchdog_s is not None:
            self._systemd.tell(WATCHDOG=1)

    def _say(self, status: str) -> None:
        with self._lock:
            if status != self._status and not self._was_stopped:
                self._status = status
                self._systemd.tell(STATUS=status)

    def _goes_on(self) -> bool:
        """Return whether a start does anything: its processes take CPU time or read, or there is
        none yet to do so.
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
