"""The run's side of the process that delivers: it is started when there is something, told of more, and waits for nobody.

A write costs the run no more than its line in the file, and a word to the process where that waits for one: told once, it delivers all
that the file holds by then. The process has Python's lock and a low priority of its own, a session of its own, since Ctrl-C is for the
command, and no descriptor of ours.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import select
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard import clean_start
from oomguard.journal.place import Shared
from oomguard.journal.spool import Spool, attempts_in, read_from, waiting
from oomguard.report.json import json_line

_MODULE: Final = "oomguard.journal.deliverer"
_AT_ONCE: Final = 65536
# Python's lock is held until a process that is started has its program: the write that asked for it has returned by then.
_START_S: Final = 0.03
# A run's attempts seldom come to that.
_LARGE_BYTES: Final = 1 << 20
# Processes that go on when their run has ended: kept, as Python warns of one that is forgotten before it has ended.
_left: Final[list[subprocess.Popen[bytes]]] = []


@dataclass(frozen=True, slots=True)
class Undelivered:
    """What waits on this machine when a run ends, why, and the command that delivers it; no run ever does where it ``is_refused``."""

    attempts: int
    reason: str
    command: str
    is_refused: bool = False


class Delivery:
    """Has what a run writes delivered. Nothing waits for the process that does it; it ends with this one, or soon after it.

    Args:
        shared: where to.
        spool: what the run writes.
    """

    def __init__(self, shared: Shared, spool: Spool) -> None:
        self._shared, self._spool = shared, spool
        self._process: _Process | None = None
        self._starting: threading.Event | None = None  # set when the process is there
        self._is_over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._round = 0  # how often the file was emptied
        self._delivered = 0  # of the file as it is now
        self._failure, self._is_refused = "", False
        self._is_asked = False  # and has not answered yet

    def wake(self) -> None:
        """Have what is new delivered."""
        with self._one_at_a_time:
            self._hear()
            if self._process is not None and not self._is_asked:
                self._tell()
            elif self._process is None and self._starting is None:
                self._starting = threading.Event()
                try:
                    _thread.start_new_thread(self._start, ())  # Thread.start() waits until the thread has a processor
                except RuntimeError as error:  # no more threads are permitted
                    self._starting, self._failure = None, str(error)

    def make_room(self) -> None:
        """Empty a large file where all of it is delivered: before something is written, and seldom, as a file system takes its time."""
        if self._spool.size < _LARGE_BYTES:
            return
        with self._one_at_a_time:
            self._hear()
            is_idle = self._process is None or not self._is_asked
            if is_idle and self._delivered and self._spool.empty(self._delivered):
                self._round, self._delivered = self._round + 1, 0

    def finish(self, wait_s: float) -> Undelivered | None:
        """Deliver at once; wait so long at most, and no longer than one try takes that fails. Return what is left."""
        until = time.monotonic() + wait_s
        self._is_over.set()
        starting = self._starting
        if starting is not None:
            starting.wait()  # else the process would be there when all is over
        with self._one_at_a_time:
            self._hear()
            for _ in range(2):  # one that left just now, since it had nothing to do, did not hear it
                if self._delivered < self._spool.size:
                    self._deliver_last(until)
                if self._failure or self._process is not None:
                    break
            is_gone = self._process is None
            rows, _end = read_from(self._spool.fd, self._delivered)
            self._leave() if not rows and self._others_wait() else self._end()
        why = "the process that delivers ended" if is_gone else f"the database had not taken it after {wait_s:g} s"
        command = f"oomguard history --deliver --journal {shlex.quote(str(self._shared))}"
        return Undelivered(attempts_in(rows), self._failure or why, command, self._is_refused) if rows else None

    def _deliver_last(self, until: float) -> None:
        """Wait until all is delivered, or the process has tried and left, or it is late."""
        self._process = self._process or self._started()
        self._tell(is_last=True)
        while self._process is not None and self._delivered < self._spool.size and time.monotonic() < until:
            self._hear(until - time.monotonic())

    def _others_wait(self) -> bool:
        """Return whether runs before left something behind, which a run shorter than a delivery has not brought either."""
        return any(path != self._spool.path for path in waiting(self._spool.path.parent))

    def _leave(self) -> None:
        """Have the process go on with that, and wait for nothing: it is nobody's child any more when this process has ended."""
        if self._process is not None:
            self._tell(is_last=True)
            self._process.leave()
            self._process = None

    def _start(self) -> None:
        is_there = self._starting or threading.Event()
        try:
            self._is_over.wait(_START_S)
            process = self._started()
            with self._one_at_a_time:
                self._process, self._starting = process, None
                self._tell()
        finally:
            is_there.set()

    def _started(self) -> _Process | None:
        """Start the process, and tell it what it delivers where; the URL may hold a password, which no command line shows."""
        self._failure = ""
        try:
            process = _Process()
        except (OSError, RuntimeError) as error:  # no more processes are permitted
            self._failure = str(error)
            return None
        process.say({"url": self._shared.url, "path": os.fspath(self._spool.path)})
        return process

    def _tell(self, *, is_last: bool = False) -> None:
        if self._process is not None:
            self._process.say({"round": self._round, "is_last": is_last})
            self._is_asked = True

    def _hear(self, wait_s: float = 0.0) -> None:
        """Take in what the process has said, or that it is gone."""
        answers = [] if self._process is None else self._process.heard(wait_s)
        if answers is None:
            self._end()
            return
        for answer in answers:
            self._failure, self._is_refused = answer.get("failure", ""), answer.get("is_refused", False)
            if answer.get("round") == self._round:
                self._delivered, self._is_asked = answer["end"], False

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process, self._is_asked = None, False


class _Process:
    """A deliverer at the other end of a socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._said = b""
        try:
            with theirs:
                self._process = subprocess.Popen(
                    clean_start.command(_MODULE),
                    env=clean_start.environment(),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    def say(self, order: Mapping[str, object]) -> None:
        """Send an order, and wait for nothing: a process with a full socket has orders enough, one that is gone is heard of."""
        with contextlib.suppress(OSError):
            self._socket.send(f"{json_line(order)}\n".encode())

    def heard(self, wait_s: float) -> list[dict[str, Any]] | None:
        """Return its answers since, after waiting so long at most for the first; None where it is gone."""
        if wait_s > 0:
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(self._socket, select.POLLIN)
            poll.poll(wait_s * 1000)
        try:
            said = self._socket.recv(_AT_ONCE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._said = (self._said + said).split(b"\n")
        return [json.loads(line) for line in lines] if said else None

    def leave(self) -> None:
        """Let it go on, and hear it no more."""
        _left.append(self._process)
        self._socket.close()

    def end(self) -> None:
        """End it; what it has under way is in one transaction."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
