"""Give a command its standard input so that what it does not read stays in ours, for whoever reads there next.

Nothing goes back into a pipe. So what waits in ours is doubled into the command's, and taken from ours once the command has read
it. Its pipe is made as small as what it holds: it has room again, and says so, when the command reads.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from typing import Final

from oomguard.supervise.kept_input import KeptInput, receive
from oomguard.supervise.pipes import kernel_tee, resize, shrink, waiting_bytes

_GIVEN_BYTES: Final = 1 << 16  # what a pipe holds that nobody has resized, and one read of it returns
_WIDE_BYTES: Final = 1 << 20
# A command that has read a part of what it was given is asked for the rest, ever less often.
_SHORTEST_S: Final = 0.001
_LONGEST_S: Final = 0.05


class Feeder:
    """A thread that gives one attempt what is kept, then what comes.

    Args:
        source: our standard input, a pipe or a stream socket.
        writer: the command's end; closed when our own input ends.
        kept: what earlier attempts have read; what this one reads is added.
    """

    def __init__(self, source: int, writer: int, kept: KeptInput) -> None:
        self._source, self._writer, self._kept = source, writer, kept
        self._wake_reader, self._wake_writer = os.pipe()
        self._room, self._input = select.poll(), select.poll()
        self._room.register(writer, select.POLLOUT)
        self._input.register(source, select.POLLIN)
        for poll in (self._room, self._input):
            poll.register(self._wake_reader, select.POLLHUP)
        self._double: Callable[[], int] = _doubling(source, writer)
        self._thread = threading.Thread(target=self._run, name="oomguard-stdin", daemon=True)

    def start(self) -> None:
        """Begin."""
        os.set_blocking(self._writer, False)
        self._thread.start()

    def stop(self) -> None:
        """End it; what the command has not read is in ours."""
        os.close(self._wake_writer)
        self._thread.join()
        os.close(self._wake_reader)

    def _run(self) -> None:
        try:
            if self._replay() and self._follow():
                self._pass_on()
        except OSError:  # nobody reads any more
            return
        finally:
            os.close(self._writer)

    def _replay(self) -> bool:
        """Write what is kept; return False where the attempt ended or reads no more."""
        at = 0
        while data := self._kept.read(at, _GIVEN_BYTES):
            if not self._is_read():
                return False
            resize(self._writer, _GIVEN_BYTES)
            at += os.write(self._writer, data)
        return True

    def _follow(self) -> bool:
        """Give what comes, and keep what is read of it; return True where the rest cannot be kept."""
        while self._kept.lost is None:
            if not (self._is_read() and self._comes()):
                return False
            resize(self._writer, _GIVEN_BYTES)
            try:
                given = self._double()
            except (
                BlockingIOError,
                BrokenPipeError,
            ):  # another reader was quicker; or nobody reads, which the next look finds
                continue
            except OSError as error:
                self._kept.lost = f"standard input could not be kept: {error.strerror}"
                break
            if not given:
                return False
            is_read = self._is_read()
            self._kept.take(self._source, given - waiting_bytes(self._writer))
            if not is_read:
                return False
        return True

    def _pass_on(self) -> None:
        """Move what comes, ahead of the command: it goes faster, and nothing is lost that was not lost before."""
        resize(self._writer, _WIDE_BYTES)
        while self._has_room() and self._comes():
            try:
                if not os.splice(self._source, self._writer, _WIDE_BYTES, flags=os.SPLICE_F_NONBLOCK):
                    return
            except BlockingIOError:
                continue

    def _is_read(self) -> bool:
        """Wait until the command has read all that it was given; return False where it will not."""
        shrink(self._writer)
        pause_s = _SHORTEST_S
        while self._has_room():
            if not waiting_bytes(self._writer):
                return True
            if self._ended(pause_s):
                return False
            pause_s = min(2 * pause_s, _LONGEST_S)
        return False

    def _ended(self, wait_s: float) -> bool:
        """Wait so long for the end of the attempt; return whether it came."""
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLHUP)
        return bool(poll.poll(wait_s * 1000))

    def _has_room(self) -> bool:
        ready = dict(self._room.poll())
        return self._wake_reader not in ready and not ready[self._writer] & select.POLLERR

    def _comes(self) -> bool:
        """Wait until ours has bytes or is at its end; return False where the attempt ends first."""
        return self._wake_reader not in dict(self._input.poll())


def can_feed(fd: int) -> bool:
    """Return whether a descriptor is one from which can be given without taking: a pipe, a stream socket of this machine (ssh, node).

    One of a network is the command's own: it asks who is at the other end (inetd).
    """
    mode = os.fstat(fd).st_mode
    if not stat.S_ISSOCK(mode):
        return stat.S_ISFIFO(mode)
    with socket.socket(fileno=os.dup(fd)) as own:
        return (own.family, own.type) == (socket.AF_UNIX, socket.SOCK_STREAM)


def _doubling(source: int, writer: int) -> Callable[[], int]:
    """Return what gives the command some of what waits in ours, and leaves it there; 0 at the end."""
    if stat.S_ISSOCK(os.fstat(source).st_mode):
        return lambda: _peek(source, writer)
    tee = kernel_tee()

    def double() -> int:
        if tee is None:
            raise OSError(0, "this system cannot double what waits in a pipe")
        return tee(source, writer, _GIVEN_BYTES)

    return double


def _peek(source: int, writer: int) -> int:
    data = receive(source, _GIVEN_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return os.write(writer, data) if data else 0
