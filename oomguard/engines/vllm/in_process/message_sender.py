"""Send vLLM's log records from each process of an engine to the guarded start.

vLLM's plugin calls ``start_sending`` in spawned processes; forked ones inherit it. The module
imports only the standard library, does nothing without our variable, and never raises: the engine
starts whatever goes wrong here.

A log record factory intercepts the records. vLLM configures its handlers anew in each process,
which would drop a handler of ours.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from oomguard.engines.vllm.plugin import LISTENER, LOG_FILE

# Under `oomguard run` the records go into a file instead, because the program may redirect its
# output. The file's folder exists only while the attempt runs.

_MOST_BYTES = 4 << 20
# Above this size no log records are written, so that the survived steps of weeks have room.
_MOST_RECORD_BYTES = 3 << 20
# Above this size only warnings and errors are written: a server may run for weeks.
_MOST_INFORMATION_BYTES = 1 << 20
_INFORMATION = b'"level": "INFO"'
_RECORD = b'"level": "'


class LogFile:
    """The log file, opened by one process of the engine; it has a socket's methods."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)

    def sendall(self, row: bytes) -> None:
        """Append a row. Raises OSError if the file is full or cannot be written."""
        size = os.fstat(self._descriptor).st_size
        if size > _MOST_BYTES:
            raise OSError("the file of vLLM's log records is full")
        if size > _MOST_RECORD_BYTES and _RECORD in row:
            return
        if size <= _MOST_INFORMATION_BYTES or _INFORMATION not in row:
            os.write(self._descriptor, row)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


_MOST_CHARS = 32_768
# How long a log record may wait for a receiver that does not read.
_WAIT_S = 0.5
# A Unix address is short: a longer path is reached through its folder's descriptor.
_MOST_PATH_BYTES = 100


def start_sending(path: str | None = None) -> None:
    """Start to send vLLM's log records to the receiver at ``path``; never raises.

    ``path`` None: to the socket or file that our variables name.
    """
    try:
        path = path or os.environ.get(LISTENER)
        listens = bool(path)
        path = path or os.environ.get(LOG_FILE)
        if not path or (
            _sender.path == path and _sender.pid == os.getpid() and not _sender.is_over
        ):
            return
        _sender.begin(path, is_file=not listens)
        current = logging.getLogRecordFactory()
        if not _is_in_place(current):
            logging.setLogRecordFactory(_Factory(current))
        if listens:
            _sender.say({"hello": os.getppid()})
            _watch_segments()
        elif limits := _limits():
            _sender.say({"limits": limits})
    except Exception:  # noqa: BLE001, S110 - an error here must not stop an engine's start
        pass


def send_row(row: dict[str, Any]) -> None:
    """Send a message of another module, if this process sends; never raises."""
    with contextlib.suppress(Exception):
        _sender.say(row)


def stop_sending() -> None:
    """Stop sending from this process, and undo all changes; never raises."""
    try:
        _sender.end()
        current = logging.getLogRecordFactory()
        if isinstance(current, _Factory):
            logging.setLogRecordFactory(current.inner)
        _unwatch_segments()
    except Exception:  # noqa: BLE001, S110 - as in start_sending
        pass


class _Sender:
    """One process's connection to the receiver. A forked process opens its own."""

    def __init__(self) -> None:
        self.path = ""
        self.is_file = False
        self.pid = 0
        self.is_over = True
        self._socket: socket.socket | LogFile | None = None
        self._lock = threading.Lock()
        self._thread = 0

    def begin(self, path: str, *, is_file: bool = False) -> None:
        self.end()
        self.path = path
        self.is_file = is_file
        self.pid = 0
        self.is_over = False
        self._thread = threading.get_ident()

    def end(self) -> None:
        self.is_over = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def is_foreign(self) -> bool:
        """Return whether this is a thread of the receiving process that is not the engine's."""
        return threading.get_ident() != self._thread

    def say(self, row: dict[str, Any]) -> None:
        """Send one message; after the first failure none is sent any more."""
        if self.is_over:
            return
        # A fork may have inherited a lock that none of its threads will release.
        if self.pid != os.getpid():
            self.pid = os.getpid()
            self._lock = threading.Lock()
            self._socket = None
        if not self._lock.acquire(timeout=_WAIT_S):
            return
        try:
            if self._socket is None:
                if self.is_file:
                    self._socket = LogFile(self.path)
                else:
                    self._socket = _connected(self.path)
            message = {"pid": self.pid, "process": _process_name(), **row}
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError, TypeError):
            self.end()
        finally:
            self._lock.release()

    def record(self, record: logging.LogRecord) -> None:
        """Send one log record of vLLM, with its traceback."""
        text = record.getMessage()[:_MOST_CHARS]
        message = {
            "level": record.levelname,
            "at": f"{record.filename}:{record.lineno}",
            "text": text,
        }
        message["stamp"] = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        if isinstance(record.exc_info, tuple):
            error = record.exc_info[1]
        else:
            error = None
        if error is not None:
            message["traceback"] = "".join(traceback.format_exception(error))[-_MOST_CHARS:]
        self.say(message)


class _Factory:
    """Makes log records with the original factory, and sends those of vLLM."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self.inner(*args, **kwargs)
        try:
            if (
                not _sender.is_over
                and record.levelno >= logging.INFO
                and record.name.partition(".")[0] == "vllm"
                and not (_sender.pid == os.getpid() and _is_listener() and _sender.is_foreign())
            ):
                _sender.record(record)
        except Exception:  # noqa: BLE001, S110 - as in start_sending
            pass
        return record


def _limits() -> dict[str, int]:
    """Return this process's memory limits; a wrapper (prlimit, ulimit) limits only its command."""
    import resource

    kinds = {
        "process_data_limit_bytes": resource.RLIMIT_DATA,
        "host_available_bytes": resource.RLIMIT_AS,
    }
    limits = {}
    for fact, kind in kinds.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            limits[fact] = limit
    return limits


def _is_in_place(factory: Any) -> bool:
    """Return whether our factory is installed; vLLM may have put its own around it."""
    while factory is not None:
        if isinstance(factory, _Factory):
            return True
        factory = getattr(factory, "_factory", None)
    return False


_sender = _Sender()
_listener_pid = 0
_own_inits: dict[Any, Any] = {}


def mark_as_receiver() -> None:
    """Mark this process as the receiver: only the thread that starts the engine sends from it."""
    global _listener_pid  # noqa: PLW0603 - one for this process
    _listener_pid = os.getpid()


def _is_listener() -> bool:
    return _listener_pid == os.getpid()


def _connected(path: str) -> socket.socket:
    """Return a connection to the receiver. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_WAIT_S)
        with_address(path, connection.connect)
    except BaseException:
        connection.close()
        raise
    return connection


def with_address(path: str, use: Any) -> None:
    """Call ``use`` with an address for a socket's path of any length. Raises OSError."""
    if len(os.fsencode(path)) <= _MOST_PATH_BYTES:
        use(path)
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        use(f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


def _process_name() -> str:
    """Return vLLM's or Python's name of this process; "" for the receiving process."""
    if _is_listener():
        return ""
    info = getattr(sys.modules.get("vllm.logger"), "_vllm_process_info", None)
    if isinstance(info, tuple) and len(info) == 2 and info[1] == os.getpid():
        return str(info[0])
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        return str(process.current_process().name)
    return "process"


def _watch_segments() -> None:
    """Report the shared memory that this process makes.

    Once the process is gone, nothing else shows whose it is.
    """
    from multiprocessing import shared_memory

    _report_objects(
        shared_memory.SharedMemory,
        lambda made, creates: str(made._name).lstrip("/") if creates else None,
    )
    # Semaphores of the receiving process end with their objects.
    if not _is_listener():
        from multiprocessing import synchronize

        _report_objects(
            synchronize.SemLock, lambda made, _creates: f"sem.{made._semlock.name.lstrip('/')}"
        )


def _report_objects(owner: Any, name_of: Any) -> None:
    """Report the name of each object that a class makes in the engine's own threads."""
    own = owner.__init__
    if owner in _own_inits:
        return

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        try:
            name = name_of(self, kwargs.get("create", args[1] if len(args) > 1 else False))
            if name and not (_is_listener() and _sender.is_foreign()):
                _sender.say({"segment": name})
        except Exception:  # noqa: BLE001, S110 - as in start_sending
            pass

    init._oomguard = True  # type: ignore[attr-defined]
    owner.__init__ = init
    _own_inits[owner] = own


def _unwatch_segments() -> None:
    for owner, own in list(_own_inits.items()):
        if getattr(owner.__init__, "_oomguard", False):
            owner.__init__ = own
            del _own_inits[owner]
