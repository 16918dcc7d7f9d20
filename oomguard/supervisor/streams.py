"""Handle standard streams: their state at the start, standard input, and copied output."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import selectors
import stat
import struct
import termios
import time
from collections.abc import Callable
from typing import IO, Final

from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.terminal_modes import LineEnds

# linux/splice.h
_SPLICE_F_NONBLOCK: Final = 2


def kernel_tee() -> Callable[[int, int, int], int] | None:
    """Return tee(2), which copies a pipe's content to another pipe; None if libc lacks it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).tee
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint)
    function.restype = ctypes.c_ssize_t

    def tee(source: int, sink: int, count: int) -> int:
        found = int(function(source, sink, count, _SPLICE_F_NONBLOCK))
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found

    return tee


def resize(pipe: int, size_bytes: int) -> None:
    """Set the capacity of a pipe; keep it if the system refuses."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size_bytes)
    except OSError:
        return


def waiting_bytes(fd: int) -> int:
    """Return the number of bytes that wait in a pipe; either end works."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])


def has_no_reader(fd: int) -> bool:
    """Return whether a pipe or socket has no reader; a terminal always has one."""
    if os.isatty(fd):
        return False
    poll = select.poll()
    # poll() reports errors and hang-ups even if they are not requested.
    poll.register(fd, 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


def is_one_stream() -> bool:
    """Return whether standard output and error go to the same place (``2>&1``)."""
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        return False


def writable() -> frozenset[int]:
    """Return which of standard output and error are writable.

    A stream that is open for reading only is passed to the command as it is.
    """
    found = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.add(number)
    return frozenset(found)


class StandardInput:
    """Provide the standard input of each attempt: our own, or a file opened for each.

    A regular file is read again from its first position. Bytes that the command reads from a pipe
    are gone, which ``lost`` reports.

    Args:
        fd: our own standard input.
        path: the file of ``--input``; None for our own.
    """

    def __init__(self, fd: int = 0, *, path: str | None = None) -> None:
        self._fd = fd
        self._path = path
        self._start: int | None = None
        self._is_pipe = False
        self._most_waiting = 0
        self._had_ended = False
        self.lost: str | None = None
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if path is not None:
                return
            if stat.S_ISREG(mode):
                self._start = os.lseek(fd, 0, os.SEEK_CUR)
            elif stat.S_ISFIFO(mode) and _is_writable(fd):
                self.lost = "standard input is a pipe that is also open for writing"
            elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                self._is_pipe = True
                self._most_waiting, self._had_ended = self._waiting()

    def for_child(self) -> int | None:
        """Return the command's standard input, to be closed after the start; None for our own.

        Raises:
            OSError: if the file cannot be opened.
        """
        if self._path is not None:
            if stat.S_ISFIFO(os.stat(self._path).st_mode):
                why = "it is a named pipe, which gives its input once; give a regular file"
                raise OSError(errno.EINVAL, why, self._path)
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        if self._start is not None:
            os.lseek(self._fd, self._start, os.SEEK_SET)
        return None

    def look(self) -> None:
        """Check how much waits in a pipe, regularly while the command runs and after its end."""
        if not self._is_pipe:
            return
        waiting, has_ended = self._waiting()
        if waiting < self._most_waiting or (has_ended and not self._had_ended and not waiting):
            self._is_pipe = False
            self.lost = (
                "the command read its standard input from a pipe, which cannot be read twice"
            )
        self._most_waiting = max(self._most_waiting, waiting)

    def _waiting(self) -> tuple[int, bool]:
        """Return how many bytes wait, and whether no more can come."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        try:
            return waiting_bytes(self._fd), any(event & select.POLLHUP for _, event in poll.poll(0))
        except OSError:
            return 0, False


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


CHUNK_BYTES: Final = 1 << 20
# A descriptor that may block (a terminal, a socket) accepts this many bytes when it is ready.
_READY_BYTES: Final = 4096
POLL_S: Final = 0.1
# An orphan that keeps the pipe open prevents end-of-file forever. After the child's end and its
# output, reading stops after this time.
DRAIN_S: Final = 2.0
# When the command is to end, a reader that accepts nothing for this long is no longer waited for.
PATIENCE_S: Final = 2.0
# Errors of a full disk, a quota or a size limit, after which the command continues.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class _Stream:
    """Hold the state of one copied stream.

    ``pending`` was read but is not written yet. ``owed_bytes`` were in the pipe at the child's end.
    """

    def __init__(self, source: IO[bytes], sink_fd: int, line_ends: LineEnds | None) -> None:
        self.source = source
        self.sink_fd = sink_fd
        self.line_ends = line_ends
        self.between_pipes = self.discards = self.may_block = False
        self.pending = memoryview(b"")
        self.nobody_reads = False
        self.lost_bytes = self.owed_bytes = 0
        self.waits_since_s = 0.0


class Tee:
    """Copy pipes to descriptors and to a recording until they end.

    After the child's end and its own output, copying stops after a moment.

    Attributes:
        lost_reader: whether one of our readers was gone before the end.
    """

    def __init__(self, recording: OutputBuffer) -> None:
        self._recording = recording
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._buffer = memoryview(bytearray())
        self._tee = kernel_tee()
        self.lost_reader = False
        self._stopping: Callable[[], bool] = lambda: False

    def add(self, source: IO[bytes], sink_fd: int, line_ends: LineEnds | None = None) -> None:
        """Copy ``source`` to ``sink_fd`` as it arrives.

        With ``line_ends``, a terminal's line ends are recorded as the command printed them.
        """
        fd = source.fileno()
        os.set_blocking(fd, False)
        from_pipe = _is(fd, stat.S_ISFIFO)
        to_pipe = _is(sink_fd, stat.S_ISFIFO)
        between_pipes = from_pipe and to_pipe and self._tee is not None
        if from_pipe:
            # A larger pipe lets the command wait for us less often.
            resize(fd, CHUNK_BYTES)
        if between_pipes:
            # A larger pipe lets each step copy more.
            resize(sink_fd, CHUNK_BYTES)
        discards = from_pipe and _discards(sink_fd)
        stream = _Stream(source, sink_fd, line_ends)
        stream.between_pipes = between_pipes
        stream.discards = discards
        stream.may_block = not _is(sink_fd, stat.S_ISREG)
        self._streams.append(stream)
        self._selector.register(fd, selectors.EVENT_READ, stream)

    def watch(self, fd: int, events: int, serve: Callable[[], None]) -> None:
        """Call ``serve`` between the copying whenever a descriptor is ready."""
        self._selector.register(fd, events, serve)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor."""
        self._selector.unregister(fd)

    @property
    def lost_bytes(self) -> dict[int, int]:
        """Bytes that a full disk did not accept, by their descriptor."""
        found = {}
        for stream in self._streams:
            if stream.lost_bytes:
                found[stream.sink_fd] = stream.lost_bytes
        return found

    def pump(
        self, ended: Callable[[], bool], tick: Callable[[], None], stopping: Callable[[], bool]
    ) -> None:
        """Copy until every pipe is at its end.

        Args:
            ended: returns whether the child has exited.
            tick: called between reads, and while the reader of the output is slow.
            stopping: once it returns True, unread output is dropped after a moment, so that a
                paused reader cannot delay the end.
        """
        self._stopping = stopping
        ended_s: float | None = None
        looked_s = time.monotonic()
        while self._open():
            for key, _ in self._selector.select(POLL_S):
                if isinstance(key.data, _Stream):
                    self._copy(key.data)
                else:
                    key.data()
            tick()
            if time.monotonic() - looked_s >= POLL_S:
                self._end_unread()
                looked_s = time.monotonic()
            if stopping():
                self._drop_what_waits()
            if ended_s is None and ended():
                ended_s = time.monotonic()
                for stream in self._open():
                    stream.owed_bytes = waiting_bytes(stream.source.fileno())
            if ended_s is not None and not self._owes() and time.monotonic() - ended_s > DRAIN_S:
                break
        for stream in self._open():
            self._finish(stream)
        self._selector.close()

    def _open(self) -> list[_Stream]:
        found = []
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Stream):
                found.append(key.data)
        return found

    def has_pending(self) -> bool:
        """Return whether bytes were read that a slow reader has not accepted yet."""
        return any(stream.pending for stream in self._open())

    def _owes(self) -> bool:
        """Return whether bytes of the child still wait for their reader."""
        return any(stream.pending or stream.owed_bytes > 0 for stream in self._open())

    def _copy(self, stream: _Stream) -> None:
        try:
            if stream.pending:
                self._flush(stream)
            elif stream.nobody_reads or stream.discards:
                self._only_keep(stream)
            elif stream.between_pipes:
                self._pass_on(stream)
            else:
                self._read(stream)
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._lose_reader(stream)
        except OSError as error:
            if error.errno == errno.EIO and not stream.between_pipes and not stream.pending:
                # A terminal whose other end is closed reports EIO instead of an end.
                self._finish(stream)
                return
            raise

    def _end_unread(self) -> None:
        """Close the pipes whose reader is gone, even without output.

        ``tail -f`` checks for that.
        """
        for stream in self._open():
            if stream.may_block and has_no_reader(stream.sink_fd):
                self._lose_reader(stream)

    def _lose_reader(self, stream: _Stream) -> None:
        """Close the child's pipe, as it would be closed without oomguard (``| head``)."""
        self.lost_reader = True
        self._finish(stream)

    def _pass_on(self, stream: _Stream) -> None:
        """Let the kernel duplicate the waiting bytes, and move one copy into the recording."""
        assert self._tee is not None  # noqa: S101 - between_pipes implies it
        source = stream.source.fileno()
        try:
            count = self._tee(source, stream.sink_fd, self._recording.room)
        except BlockingIOError:
            if waiting_bytes(stream.source.fileno()):
                self._wait_for_sink(stream)
            return
        if not count:
            self._finish(stream)
            return
        self._recording.take(stream.sink_fd, source, count)
        stream.owed_bytes -= count
        self._wait_for_source(stream)

    def _only_keep(self, stream: _Stream) -> None:
        count = min(waiting_bytes(stream.source.fileno()), self._recording.room)
        if count:
            self._recording.take(stream.sink_fd, stream.source.fileno(), count)
            stream.owed_bytes -= count
        else:
            # No waiting bytes mean the end, or bytes that came just now.
            self._read(stream)

    def _read(self, stream: _Stream) -> None:
        if not self._buffer:
            self._buffer = memoryview(bytearray(CHUNK_BYTES))
        count = os.readv(stream.source.fileno(), [self._buffer])
        if not count:
            self._finish(stream)
            return
        ends = stream.line_ends
        if ends is not None:
            count = ends.read_on(stream.source.fileno(), self._buffer, count)
        stream.owed_bytes -= count
        data = self._buffer[:count]
        printed, data = ends.split(data) if ends is not None else (data, data)
        self._recording.write(stream.sink_fd, printed)
        if not stream.nobody_reads:
            left = self._write(stream, data)
        else:
            left = None
        if left:
            stream.pending = memoryview(bytes(left))
            self._wait_for_sink(stream)

    def _flush(self, stream: _Stream) -> None:
        stream.pending = self._write(stream, stream.pending)
        stream.waits_since_s = time.monotonic()
        if not stream.pending:
            self._wait_for_source(stream)

    def _write(self, stream: _Stream, data: memoryview) -> memoryview:
        """Write as much as possible without waiting; return the rest."""
        while data:
            if stream.may_block and not _is_ready(stream.sink_fd):
                return data
            try:
                data = data[
                    os.write(stream.sink_fd, data[:_READY_BYTES] if stream.may_block else data) :
                ]
            except BlockingIOError:
                return data
            except BrokenPipeError:
                raise
            except OSError as error:
                if error.errno not in _FULL:
                    raise BrokenPipeError(error.errno, error.strerror) from None
                stream.lost_bytes += len(data)
                return data[:0]
        return data

    def _wait_for_sink(self, stream: _Stream) -> None:
        """Pause a source until its reader has accepted more; the other streams continue."""
        stream.waits_since_s = time.monotonic()
        if self._selector.get_map().get(stream.source.fileno()) is None:
            # The stream waits already, because another writer used the free space.
            return
        self._selector.unregister(stream.source.fileno())
        self._selector.register(stream.sink_fd, selectors.EVENT_WRITE, stream)

    def _wait_for_source(self, stream: _Stream) -> None:
        if self._selector.get_map().get(stream.sink_fd) is not None:
            self._selector.unregister(stream.sink_fd)
            self._selector.register(stream.source.fileno(), selectors.EVENT_READ, stream)

    def _drop_what_waits(self) -> None:
        """Continue without a reader that has stopped reading, because the command is to end."""
        for stream in self._open():
            waits = self._selector.get_map().get(stream.sink_fd) is not None and not _is_ready(
                stream.sink_fd
            )
            if not waits or time.monotonic() - stream.waits_since_s < PATIENCE_S:
                continue
            self._wait_for_source(stream)
            stream.pending = memoryview(b"")
            stream.nobody_reads = True

    def _finish(self, stream: _Stream) -> None:
        for fd in (stream.source.fileno(), stream.sink_fd):
            if (
                self._selector.get_map().get(fd) is not None
                and self._selector.get_key(fd).data is stream
            ):
                self._selector.unregister(fd)
        stream.source.close()


def _discards(fd: int) -> bool:
    """Return whether a descriptor discards its input (/dev/null)."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(os.devnull))
    except OSError:
        return False


def _is(fd: int, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(os.fstat(fd).st_mode)
    except OSError:
        return False


def _is_ready(fd: int) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        return bool(selector.select(0))
