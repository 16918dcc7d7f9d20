"""What the processes of a start print, taken at the descriptor: of one that died before it could speak this is all there is.

While the start goes on a pipe lies at the descriptor, and what comes out of it is written to where it would have gone. Then
this process has its descriptor back. What was started meanwhile keeps the pipe, so its pump goes on until the last of it
has ended. Copying comes first: nothing waits for a diagnosis.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import termios
import threading
import time
from collections import deque
from typing import Final

_CHUNK_BYTES: Final = 1 << 16
_MOST_FIRST_BYTES: Final = 1 << 18
_MOST_LAST: Final = 16  # chunks
_DRAINS_WITHIN_S: Final = 0.5


class Capture:
    """Takes what is written to one descriptor, from ``begin`` to ``end``; a descriptor that cannot be taken stays as it is."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._saved: int | None = None
        self._pump: _Pump | None = None

    def begin(self) -> None:
        """Lay the pipe; never raises for a descriptor that cannot be taken."""
        _flush()
        reading = writing = out = saved = None
        try:
            saved, out = os.dup(self._descriptor), os.dup(self._descriptor)
            reading, writing = os.pipe()
            self._pump = _Pump(reading, out)
            os.dup2(writing, self._descriptor, inheritable=True)
            try:
                self._pump.start()
            except RuntimeError:
                os.dup2(saved, self._descriptor, inheritable=True)
                raise
        except (OSError, RuntimeError):
            self._pump = None
            for one in (reading, out, saved):
                if one is not None:
                    os.close(one)
        else:
            self._saved = saved
        finally:
            if writing is not None:
                os.close(writing)

    def end(self) -> None:
        """Give the descriptor back, and write what has come through the pipe until then."""
        if self._saved is None or self._pump is None:
            return
        _flush()
        saved, self._saved = self._saved, None
        with contextlib.suppress(OSError):
            os.dup2(saved, self._descriptor, inheritable=True)
        os.close(saved)
        self._pump.drain()

    def text(self) -> str:
        """Return what was written, its beginning and its end; afterwards nothing is kept any more."""
        if self._pump is None:
            return ""
        return self._pump.taken().decode("utf-8", "replace")


class _Pump(threading.Thread):
    """Copies a pipe to a descriptor until all writers are gone, and owns both; a copy that cannot be written is dropped."""

    def __init__(self, reading: int, out: int) -> None:
        super().__init__(name="oomguard-pump", daemon=True)
        self._reading, self._out = reading, out
        self._first = bytearray()
        self._last: deque[bytes] = deque(maxlen=_MOST_LAST)
        self._keeps = True
        self._is_writing = False

    def run(self) -> None:
        """Copy to the end."""
        try:
            while True:
                select.select([self._reading], [], [])
                self._is_writing = True  # before it is read, so that an empty pipe means that all is written
                data = os.read(self._reading, _CHUNK_BYTES)
                if not data:
                    return
                self._write(data)
                self._keep(data)
                self._is_writing = False
        except (OSError, ValueError):
            return
        finally:
            self._is_writing = False
            os.close(self._reading)
            os.close(self._out)
            self._reading = -1

    def drain(self) -> None:
        """Wait, for a moment at most, until what is in the pipe has been written."""
        until_s = time.monotonic() + _DRAINS_WITHIN_S
        while time.monotonic() < until_s and self.is_alive() and (self._waiting_bytes() or self._is_writing):
            time.sleep(0.001)

    def taken(self) -> bytes:
        """Return what was kept, and keep no more."""
        self._keeps = False
        text = bytes(self._first) + b"".join(self._last)
        self._first.clear()
        self._last.clear()
        return text

    def _waiting_bytes(self) -> int:
        try:
            found: int = struct.unpack("i", fcntl.ioctl(self._reading, termios.FIONREAD, b"\0\0\0\0"))[0]
        except (OSError, ValueError):
            return 0
        return found

    def _keep(self, data: bytes) -> None:
        if not self._keeps:
            return
        if len(self._first) < _MOST_FIRST_BYTES:
            self._first += data
        else:
            self._last.append(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._out, view) :]
            except BlockingIOError:
                select.select([], [self._out], [])
            except OSError:  # its reader is gone, or its disk is full: who writes must not wait for that
                return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
