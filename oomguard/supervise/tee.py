"""Pass a child's output through unchanged while the scanner reads a copy of it."""

from __future__ import annotations

import os
import select
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Final

from oomguard.observe.scan import Scanner
from oomguard.observe.source import LineSplitter

CHUNK_BYTES: Final = 1 << 16
POLL_S: Final = 0.1
# An orphan that holds the pipe's other end keeps end-of-file away for ever, so reading stops this long after the exit.
DRAIN_S: Final = 2.0


@dataclass(slots=True)
class _Stream:
    source: IO[bytes]
    sink_fd: int
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Tee:
    """Copy pipes to file descriptors and to a scanner until they end, or until ``DRAIN_S`` after the child has."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self._selector = selectors.DefaultSelector()
        self._tick: Callable[[], None] = lambda: None
        self._stopping: Callable[[], bool] = lambda: False

    def add(self, source: IO[bytes], sink_fd: int) -> None:
        """Read ``source`` and write what comes, as it comes, to ``sink_fd``."""
        os.set_blocking(source.fileno(), False)
        self._selector.register(source, selectors.EVENT_READ, _Stream(source, sink_fd))

    def pump(self, ended: Callable[[], bool], tick: Callable[[], None], stopping: Callable[[], bool]) -> None:
        """Copy until every pipe is at its end.

        Args:
            ended: whether the child has exited.
            tick: runs between reads, and while whoever reads the output is slow.
            stopping: once true, output that nobody reads is dropped, so that a paused reader cannot hold up the end.
        """
        self._tick, self._stopping = tick, stopping
        ended_s: float | None = None
        while self._selector.get_map():
            events = self._selector.select(POLL_S)
            for key, _ in events:
                self._copy(key.data)
            tick()
            if ended_s is None and ended():
                ended_s = time.monotonic()
            if ended_s is not None and time.monotonic() - ended_s > DRAIN_S:
                break
        for key in list(self._selector.get_map().values()):
            self._finish(key.data)
        self._selector.close()

    def _copy(self, stream: _Stream) -> None:
        try:
            chunk = os.read(stream.source.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._finish(stream)
            return
        if not self._write_all(stream.sink_fd, chunk):
            # Nobody reads any more (``| head``): the child finds its pipe closed, as it would without us.
            self._finish(stream)
            return
        for line in stream.splitter.feed(chunk):
            self._scanner.push(line, str(stream.sink_fd))

    def _finish(self, stream: _Stream) -> None:
        for line in stream.splitter.feed(b"", final=True):
            self._scanner.push(line, str(stream.sink_fd))
        self._selector.unregister(stream.source)
        stream.source.close()

    def _write_all(self, fd: int, chunk: bytes) -> bool:
        """Write a chunk whole; return False when the reader has gone."""
        view = memoryview(chunk)
        while view:
            try:
                _, ready, _ = select.select([], [fd], [], POLL_S)
                if ready:
                    # A pipe that is ready takes at least PIPE_BUF bytes without blocking.
                    view = view[os.write(fd, view[: select.PIPE_BUF]) :]
                    continue
            except OSError:
                return False
            self._tick()
            if self._stopping():
                return True
        return True
