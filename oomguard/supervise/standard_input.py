"""Standard input, kept while it is passed on, so that a command that is run again reads it from its beginning.

A file is read again from where it stood. A pipe is copied on its way, up to ``CAP_BYTES``. A terminal is the command's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import tempfile
import threading
from types import TracebackType
from typing import Final

CAP_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 1 << 16


class StandardInput:
    """What ``fd`` gives, for one attempt after another: enter, give ``for_child`` to the command, ``end`` the attempt.

    Args:
        fd: our own standard input.
        keeps: whether the command may be run again; without that nothing is kept, and the command has ``fd`` itself.
    """

    def __init__(self, fd: int = 0, *, keeps: bool = True) -> None:
        self._fd = fd
        self._kept_bytes = 0
        self._over = False
        self._copy: int | None = None
        self._start: int | None = None
        self._feeder: _Feeder | None = None
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if keeps and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                with tempfile.TemporaryFile(prefix="oomguard-") as file:
                    self._copy = os.dup(file.fileno())
            elif stat.S_ISREG(mode):
                self._start = os.lseek(fd, 0, os.SEEK_CUR)

    def __enter__(self) -> StandardInput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        if self._copy is not None:
            os.close(self._copy)
            self._copy = None

    def for_child(self) -> int | None:
        """Return the descriptor that is the command's standard input, to be closed once it runs; None: our own.

        What an earlier attempt read comes first.
        """
        if self._start is not None:
            os.lseek(self._fd, self._start, os.SEEK_SET)
        if self._copy is None:
            return None
        reader, writer = os.pipe()
        self._feeder = _Feeder(self, writer)
        self._feeder.start()
        return reader

    def end(self) -> None:
        """End an attempt: nothing more is read for it."""
        if self._feeder is not None:
            self._feeder.stop()
            self._feeder = None

    @property
    def lost(self) -> str | None:
        """Why a command that is run again could not read what this one read, None where it could."""
        if self._over:
            return f"more than {CAP_BYTES >> 20} MiB of standard input have been read"
        return None

    def kept(self, at: int) -> bytes:
        """Return some of what is kept from offset ``at``, nothing at its end."""
        assert self._copy is not None  # noqa: S101 - only a feeder asks
        return os.pread(self._copy, min(_CHUNK_BYTES, self._kept_bytes - at), at)

    def read(self) -> bytes:
        """Read some of what comes, and keep it; nothing at the end."""
        data = os.read(self._fd, _CHUNK_BYTES)
        if self._copy is None or self._over or self._kept_bytes + len(data) > CAP_BYTES:
            self._over = self._over or bool(data)
            return data
        try:
            self._kept_bytes += os.pwrite(self._copy, data, self._kept_bytes)
        except OSError:  # a full disk
            self._over = True
        return data

    @property
    def source(self) -> int:
        """The descriptor that is read."""
        return self._fd


class _Feeder:
    """A thread that writes what is kept, then what comes, into the pipe of one attempt."""

    def __init__(self, source: StandardInput, writer: int) -> None:
        self._source, self._writer = source, writer
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="oomguard-stdin", daemon=True)

    def start(self) -> None:
        os.set_blocking(self._writer, False)
        self._thread.start()

    def stop(self) -> None:
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)

    def _run(self) -> None:
        at = 0
        try:
            while data := self._source.kept(at):
                at += len(data)
                if not self._write(data):
                    return
            # Nothing is read ahead: what the command has not asked for stays where it is.
            while self._ready(self._writer) and self._ready(self._source.source):
                data = self._source.read()
                if not data or not self._write(data):
                    return
        except OSError:
            return
        finally:
            os.close(self._writer)

    def _write(self, data: bytes) -> bool:
        """Write all of it; return False where the attempt has ended or nobody reads any more."""
        view = memoryview(data)
        while view:
            if not self._ready(self._writer):
                return False
            try:
                view = view[os.write(self._writer, view) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def _ready(self, fd: int) -> bool:
        """Wait until a descriptor can be used; return False where the attempt ends first."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT if fd == self._writer else select.POLLIN)
        poll.register(self._wake_reader, select.POLLHUP)
        ready = {number for number, _ in poll.poll()}
        return self._wake_reader not in ready
