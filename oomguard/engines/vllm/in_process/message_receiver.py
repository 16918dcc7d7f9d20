"""Receive what the processes of an engine report: by a Unix socket, or from the plugin's files.

The guard listens at a socket in a private folder. The kernel says which process sent a record. The
receiver keeps the first records, which have the settings, and the last ones, which have the
failure. `oomguard run` reads the plugin's files instead.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_regular
from oomguard.core.settings import surfaces
from oomguard.engines.command import StartedEngine
from oomguard.engines.vllm.in_process.message_sender import with_address
from oomguard.scan.exceptions import exception_lines
from oomguard.scan.source import Line

# One message of a process, as message_sender writes it.
Row = Mapping[str, Any]
# vllm/logging_utils/dump_input.py.
_SCHEDULED: Final = re.compile(r"scheduler output.*\bnum_scheduled_tokens=\{([^}]+)\}", re.DOTALL)


def lines_of(rows: Iterable[Row], error: BaseException | None = None) -> tuple[Line, ...]:
    """Return all records as lines of a log, followed by those of the start's exception."""
    texts = list(itertools.chain.from_iterable(map(_texts, rows)))
    if error is not None:
        texts += [line.text for line in exception_lines(error)]
    return _numbered(texts)


def last_tracebacks(rows: Sequence[Row]) -> tuple[Line, ...]:
    """Return the traceback with which each process ended, except the one that starts the engine."""
    last: dict[Any, Row] = {}
    for row in rows:
        # The process that starts the engine sends no name; its exception is known.
        if row.get("process") and row.get("traceback"):
            last[row.get("pid")] = row
    return _numbered(itertools.chain.from_iterable(map(_texts, last.values())))


def segments_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the shared memory segments that the processes made."""
    segments = [row.get("segment") for row in rows]
    return [one for one in segments if isinstance(one, str)]


def requests_in_last_step(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the requests of the step in which an engine died, as vLLM logged them."""
    for row in reversed(rows):
        text = row.get("text")
        if not isinstance(text, str):
            continue
        found = _SCHEDULED.search(text)
        if found is not None:
            return tuple(one.rpartition(": ")[0] for one in found[1].split(", "))
    return ()


def _texts(row: Row) -> Iterator[str]:
    if not isinstance(row.get("text"), str):
        return
    if row.get("process"):
        process = f"({row.get('process')} pid={row.get('pid')}) "
    else:
        process = ""
    head = f"{process}{row.get('level')} {row.get('stamp')} [{row.get('at')}] "
    trace = row.get("traceback")
    if not isinstance(trace, str):
        trace = ""
    for text in (row["text"], trace):
        for line in text.splitlines():
            yield head + line


def _numbered(texts: Iterable[str]) -> tuple[Line, ...]:
    return tuple(Line(number, 0, text) for number, text in enumerate(texts, 1))


_MOST_FIRST: Final = 2_000
_MOST_LAST: Final = 2_000
_MOST_ROW_BYTES: Final = 1 << 18
_CREDENTIALS: Final = struct.Struct("3i")
# After this time a process's last records have arrived.
_SETTLES_WITHIN_S: Final = 2.0
_QUIET_S: Final = 0.1
# A core logs this if it fails to start; then it ends.
CORE_FAILED: Final = "EngineCore failed to start."


class MessageReceiver:
    """Receives records from ``open`` to ``close``.

    If it cannot make a folder it receives none, and ``problem`` says why.

    Attributes:
        path: the path of the socket; None if it does not listen.
        problem: why it cannot listen; None if it can.
        senders: the other processes that sent records, with the clock ticks of their starts.
        failed: the processes that failed to start, with the monotonic seconds of their report.
        stays: whether it keeps listening after the start.
    """

    def __init__(self) -> None:
        self.path: str | None = None
        self.problem: str | None = None
        self.senders: dict[int, int | None] = {}
        self.failed: dict[int, float] = {}
        self.stays = False
        self._pid = os.getpid()
        self._folder: Path | None = None
        self._first: list[dict[str, Any]] = []
        self._last: deque[dict[str, Any]] = deque(maxlen=_MOST_LAST)
        self._open: dict[socket.socket, tuple[int, bytearray]] = {}
        self._received_s = 0.0
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to listen; never raises if a folder or socket cannot be made."""
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="oomguard-"))
            path = str(self._folder / "heard")
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with_address(path, self._server.bind)
            self._server.listen(64)
            self._server.setblocking(False)
            self._wake, self._woken = socket.socketpair()
            self._thread = threading.Thread(
                target=self._listen, name="oomguard-listener", daemon=True
            )
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self.problem = f"{type(error).__name__}: {error}"
            self._remove_folder()
            return
        self.path = path

    def close(self) -> None:
        """Stop listening, and release senders that wait. Does nothing in a fork of its process."""
        if self._pid != os.getpid():
            return
        thread = self._thread
        self._thread = None
        self.path = None
        if thread is not None:
            # A fork may hold the socket, so closing it has no effect.
            self._wake.send(b"end")
            # The garbage collector may run this in that thread, which cannot wait for itself.
            if thread is not threading.current_thread():
                thread.join()
            self._wake.close()
        self._remove_folder()

    def settle(self) -> None:
        """Wait until the records on their way have arrived, for at most two seconds."""
        until_s = time.monotonic() + _SETTLES_WITHIN_S
        self._received_s = time.monotonic()
        while self._thread is not None and time.monotonic() < until_s:
            if time.monotonic() - self._received_s > _QUIET_S:
                return
            time.sleep(0.01)

    def rows(self) -> list[dict[str, Any]]:
        """Return the records in the order of their arrival."""
        return [*self._first, *self._last]

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector, self._woken, self._server:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._server, selectors.EVENT_READ)
            while self._take(selector, None):
                pass
            # Records sent before the end are in the kernel's buffers; they are not lost because
            # this thread was slow.
            until_s = time.monotonic() + _SETTLES_WITHIN_S
            selector.unregister(self._woken)
            while self._take(selector, 0) and time.monotonic() < until_s:
                pass
            for connection in list(self._open):
                # A fork of this process may hold the connection too. After the shutdown the next
                # sender gets an error at once.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._open.clear()
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)

    def _take(self, selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
        """Read waiting records; return False at the end, or if none came within the timeout."""
        found = selector.select(timeout_s)
        for key, _ in found:
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._server:
                self._accept(selector)
            else:
                self._read(selector, key.fileobj)  # type: ignore[arg-type]
        return bool(found)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            pid, user, _ = _CREDENTIALS.unpack(credentials)
            if user != os.geteuid():
                connection.close()
                return
            connection.setblocking(False)
            self._open[connection] = (pid, bytearray())
            selector.register(connection, selectors.EVENT_READ)
            if pid not in {0, os.getpid()}:
                self.senders[pid] = started_ticks(pid)
            self._received_s = time.monotonic()

    def _read(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        pid, buffer = self._open[connection]
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received_s = time.monotonic()
        buffer += data
        *lines, rest = buffer.split(b"\n")
        buffer[:] = rest
        for row in _parsed(lines):
            self._keep({**row, "pid": pid or row.get("pid")})
        if not data or len(buffer) > _MOST_ROW_BYTES:
            selector.unregister(connection)
            del self._open[connection]
            connection.close()

    def _keep(self, row: dict[str, Any]) -> None:
        if str(row.get("text")).startswith(CORE_FAILED):
            self.failed[row["pid"]] = time.monotonic()
        if len(self._first) < _MOST_FIRST:
            self._first.append(row)
        else:
            self._last.append(row)


def _parsed(lines: list[bytearray]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(bytes(line))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return int(fields[19])


def is_same(pid: int, ticks: int | None) -> bool:
    """Return whether the process with these start ticks still runs under this number."""
    return ticks is not None and started_ticks(pid) == ticks


# --- the plugin's files ---

_ENGINE: Final = "vllm"
_MOST_BYTES: Final = 5 << 20
_LIMITS: Final = ("process_data_limit_bytes", "host_available_bytes")


def reported_arguments() -> list[str]:
    """Return the argument names that the plugin is to report: those of known settings only."""
    return list(_setting_by_argument())


def reported_engines(path: Path) -> tuple[StartedEngine, ...]:
    """Return the engines in the plugin's file, in the order of their starts.

    Lines that are not valid reports are skipped.
    """
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            known = found.setdefault((int(row["pid"]), int(row.get("order", 1))), {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        for key, value in row.items():
            if key == "model" or isinstance(value, dict):
                known[key] = value
    return tuple(itertools.starmap(_started_engine, found.items()))


def _started_engine(place: tuple[int, int], row: Mapping[str, Any]) -> StartedEngine:
    process, order = place
    model = None
    if isinstance(row.get("model"), str):
        model = row["model"]
    arguments = None
    if "arguments" in row:
        arguments = settings_of(row["arguments"])
    in_effect = settings_of(row.get("config", {}))
    changed = settings_of(row.get("applied", {}))
    return StartedEngine(model, order, process, arguments, in_effect, changed)


def logged_lines(path: Path) -> tuple[Line, ...]:
    """Return vLLM's log records in the plugin's file, as lines of a log."""
    return lines_of(_noted(path))


def reported_limits(path: Path) -> dict[str, int]:
    """Return the lowest memory limits that processes of vLLM reported, by fact."""
    found: dict[str, int] = {}
    for row in _noted(path):
        limits = row.get("limits")
        for name in _LIMITS:
            if isinstance(limits, dict):
                limit = limits.get(name)
            else:
                limit = None
            if isinstance(limit, int) and limit > 0:
                found[name] = min(limit, found.get(name, limit))
    return found


def survived_steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps that ran out of memory and did not end their engine, in order."""
    steps = [row.get("step_recovery") for row in _noted(path)]
    return [one for one in steps if isinstance(one, dict)]


def _noted(path: Path) -> list[dict[str, Any]]:
    try:
        texts = read_regular(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    rows = []
    for text in texts:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@functools.cache
def _setting_by_argument() -> dict[str, str]:
    """Return the setting of each argument, also of those that only other versions have."""
    names: dict[str, str] = {}
    for name, newest in surfaces(_ENGINE).items():
        for own in (newest, *newest.others):
            if own.kwarg is not None:
                names[own.kwarg] = name
    return names


def settings_of(arguments: Mapping[str, Any]) -> dict[str, FactValue]:
    """Return the engine's arguments as canonical settings in oomguard's units.

    Arguments without a setting are left out.
    """
    names = _setting_by_argument()
    found: dict[str, FactValue] = {}
    for kwarg, value in arguments.items():
        name = names.get(kwarg)
        if name is None or not isinstance(value, (bool, int, float, str)):
            continue
        own = surfaces(_ENGINE)[name]
        if str(value) in own.automatic:
            continue
        try:
            if isinstance(value, bool) or own.unit_bytes == 1:
                found[name] = value
            else:
                found[name] = own.from_engine(name, str(value))
        except SettingError:
            continue
    return found
