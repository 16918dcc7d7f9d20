"""What holds when the supervisor itself fails: the command goes on, its output arrives, and its
exit status is kept.

``run_safely`` runs the supervisor. If that raises anything, or its main loop stands still, what is
left to do is done here in a few plain system calls: become the command where it was not started
yet, else copy what it prints, hand stop signals on and take its status. Nothing here calls what may
have failed.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    import socket

# The main loop comes round at least ten times a second.
TICK_S: Final = 1.0
STALLED_TICKS: Final = 10
# A look at /proc misses a process whose parent ends meanwhile, so one look is not enough.
_LOOKS: Final = 3
_COPIED_BYTES: Final = 1 << 16
# What outlives the command keeps its pipes open: they are read for so long.
_DRAIN_S: Final = 2.0
_START_S: Final = 5.0
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SupervisorState:
    """How far the supervisor is.

    Attributes:
        beats: rises as long as the main loop goes round.
        is_starting: the reaper was asked to start a command and has not answered.
        channel: to the reaper.
        reaper_pid: the reaper.
        command_pid: the command that runs, or ran last.
        outputs: its pipes, or its terminal, each with the descriptor that it is copied to.
        inputs: what is typed, with the terminal that it is copied to.
        folder: the temporary folder of this run, which the reaper removes.
        earlier: the exit status of the attempt before; None without one.
        status: the exit status of the command that ended last; None while it runs, or before it.
        wait_status: the same as the reaper has told it.
        final: the exit status of the whole run once it is known.
    """

    def __init__(self) -> None:
        self.beats = 0
        self.is_starting = False
        self.channel: socket.socket | None = None
        self.reaper_pid: int | None = None
        self.command_pid: int | None = None
        self.outputs: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.folder: str | None = None
        self.earlier: int | None = None
        self.status: int | None = None
        self.wait_status: int | None = None
        self.final: int | None = None


PROGRESS: Final = SupervisorState()


def beat() -> None:
    """Say that the main loop goes round."""
    PROGRESS.beats += 1


def run_safely(
    words: Sequence[str], command: Sequence[str], ready: Callable[[], None] = lambda: None
) -> NoReturn:
    """Run the supervisor and exit with what it returns; where it fails, with the command's own
    status.

    Args:
        words: the command line between ``run`` and the command's words.
        command: its words.
        ready: called when a main loop that stands still would be noticed.
    """
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    closed: frozenset[int] = frozenset()
    try:
        _start_watchdog(command, masked)
        ready()
        closed = _occupy()  # before anything is opened
        from oomguard.supervisor.loop import Loop

        status = Loop(words, command, closed).run()
        os._exit(status)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the command is not to notice
        _go_on(command, masked, closed, f"{type(error).__name__}: {error}")


def _start_watchdog(command: Sequence[str], masked: set[int]) -> None:
    """Start the thread that takes over; no signal is for it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with contextlib.suppress(RuntimeError):  # no thread may be started
            threading.Thread(
                target=_watch, name="oomguard-watchdog", args=(command, masked), daemon=True
            ).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _occupy() -> frozenset[int]:
    """Put the null device in the place of each standard stream that is closed; return which ones
    were.

    The next file opened would take their place.
    """
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # the lowest free number is this one
    return frozenset(closed)


def _watch(command: Sequence[str], masked: set[int]) -> None:
    """Take over where the main loop stands still; a stop of the whole process stops
    this clock too.
    """
    seen = -1
    still = 0
    while True:
        time.sleep(TICK_S)
        beats = PROGRESS.beats
        if beats == seen:
            still = still + 1
        else:
            still = 0
        seen = beats
        if still >= STALLED_TICKS:
            _go_on(command, masked, frozenset(), "its main loop stands still")


def _go_on(
    command: Sequence[str], masked: set[int] | None, closed: frozenset[int], why: str
) -> NoReturn:
    """Do what is left of a run; never returns."""
    status = PROGRESS.final
    try:
        if status is None:
            status = _rest(command, masked, closed, why)
    finally:
        os._exit(125 if status is None else status)


def _rest(command: Sequence[str], masked: set[int] | None, closed: frozenset[int], why: str) -> int:
    progress = PROGRESS
    reader = _Reader(progress.channel)
    if progress.is_starting and progress.status is None:
        if progress.reaper_pid is not None:
            with contextlib.suppress(
                OSError
            ):  # stopped, it cannot say that the command has started
                os.kill(progress.reaper_pid, signal.SIGCONT)
        reader.read(_START_S, until_started=True)
    if progress.status is None and progress.wait_status is not None:
        progress.status = _as_shell(progress.wait_status)
    is_there = progress.command_pid is not None
    if not is_there and progress.status is None and progress.earlier is not None:
        progress.status = progress.earlier
    if not is_there and progress.status is None:
        _say(f"oomguard: the command runs without oomguard, which failed: {why}")
        _leave_reaper(wait_s=0.0)
        return _become(command, masked, closed)
    if progress.status is None:
        _say(f"oomguard: the command goes on without oomguard, which failed: {why}")
        progress.status = _copy(reader)
    else:
        _say(f"oomguard: not explained, as oomguard failed: {why}")
    was_killed = not os.path.exists(f"/proc/{progress.reaper_pid}/exe")
    _leave_reaper()
    if was_killed:
        _end_orphans()
    return progress.status


def _end_orphans(wait_s: float = 2.0) -> None:
    """Kill what the command left if somebody has killed the reaper: its orphans are ours then."""
    from oomguard.supervisor.tree import descendants

    until_s = time.monotonic() + wait_s
    looks = 0
    while looks < _LOOKS and time.monotonic() < until_s:
        left = descendants(os.getpid())
        looks = 0 if left else looks + 1
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


class _Reader:
    """Reads what the reaper says: a length, then the message."""

    def __init__(self, channel: socket.socket | None) -> None:
        if channel is None:
            self._fd = -1
        else:
            self._fd = channel.fileno()
        self._data = b""
        self.status: int | None = None
        self.is_gone = self._fd < 0

    def fileno(self) -> int:
        return self._fd

    def read(self, timeout_s: float, *, until_started: bool = False) -> None:
        """Read for so long at most, or until the reaper is gone, or has said that the command has
        started or ended.
        """
        until_s = time.monotonic() + timeout_s
        while not self.is_gone and self.status is None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
                return
            self._take()
            if until_started and PROGRESS.command_pid is not None:
                return

    def _take(self) -> None:
        try:
            data = os.read(self._fd, _COPIED_BYTES)
        except OSError:
            data = b""
        self.is_gone = not data
        self._data += data
        while len(self._data) >= 4:
            end = 4 + int.from_bytes(self._data[:4], "little")
            if len(self._data) < end:
                return
            # our own process
            message, self._data = marshal.loads(self._data[4:end]), self._data[end:]  # noqa: S302
            if message[0] == "started":
                PROGRESS.command_pid = message[1]
            elif message[0] == "exited":
                self.status = _as_shell(message[1])


def _as_shell(wait_status: int) -> int:
    """Return a wait status as a shell has it."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return 128 - code
    return code


def _copy(reader: _Reader) -> int:
    """Copy the command's output until it has ended and nothing more comes; return its status."""
    outputs = dict(PROGRESS.outputs)
    inputs = dict(PROGRESS.inputs)
    for number in _STOPS:
        with contextlib.suppress(OSError, ValueError):
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    ended_s: float | None = None
    while outputs or reader.status is None:
        _hand_on_stops()
        poll = select.poll()
        for fd in (*outputs, *inputs):
            poll.register(fd, select.POLLIN)
        if reader.status is None and not reader.is_gone:
            poll.register(reader.fileno(), select.POLLIN)
        for fd, _ in poll.poll(100):
            if fd == reader.fileno():
                reader.read(0)
            elif fd in inputs:
                if not _pass_on(fd, inputs[fd]):
                    del inputs[fd]
            elif not _pass_on(fd, outputs[fd]):
                del outputs[fd]
        if reader.status is None:
            reader.status = _status_of_zombie(reader)
        if reader.status is not None:
            ended_s = ended_s or time.monotonic()
            if time.monotonic() - ended_s > _DRAIN_S:
                break
    if reader.status is None:
        return 128 + signal.SIGKILL
    return reader.status


def _pass_on(source: int, sink: int) -> bool:
    """Copy what waits; return False at the end."""
    try:
        data = os.read(source, _COPIED_BYTES)
    except BlockingIOError:
        return True
    except OSError:
        return False
    left = data
    while left:
        poll = select.poll()
        poll.register(sink, select.POLLOUT)
        poll.poll(1000)
        try:
            left = left[os.write(sink, left[:4096]) :]
        except BlockingIOError:
            continue
        except OSError:  # nobody reads it, or the disk is full: the command goes on
            return bool(data)
    return bool(data)


def _status_of_zombie(reader: _Reader) -> int | None:
    """Return the status of a command whose reaper is gone or does not take it; None
    while it runs.
    """
    pid = PROGRESS.command_pid
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        if not reader.is_gone:
            return None
        code = _code_of_reaper()
        if code is None:
            return 128 + signal.SIGKILL
        return code
    if fields[0] != b"Z" or len(fields) < 50:
        return None
    time.sleep(0.2)
    reader.read(0)
    if reader.status is not None:
        return reader.status
    return _as_shell(int(fields[49]))


def _code_of_reaper() -> int | None:
    """Return the command's status as its reaper's own, where that could say nothing any more."""
    try:
        _, status = os.waitpid(PROGRESS.reaper_pid or 0, os.WNOHANG)
    except OSError:
        return None
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    return None


def _hand_on_stops() -> None:
    """Give the command the stop signals that wait here."""
    for number in _STOPS:
        if number in signal.sigpending():
            signal.sigtimedwait({number}, 0)
            with contextlib.suppress(OSError):
                os.kill(PROGRESS.command_pid or 0, number)


def _leave_reaper(wait_s: float = 12.0) -> None:
    """Have the reaper end what is left, and itself, or end it after a while."""
    if PROGRESS.channel is not None:
        with contextlib.suppress(OSError):
            PROGRESS.channel.shutdown(2)
    until_s = time.monotonic() + wait_s
    while PROGRESS.reaper_pid is not None and time.monotonic() < until_s:
        try:
            if os.waitpid(PROGRESS.reaper_pid, os.WNOHANG)[0]:
                break
        except OSError:
            break
        time.sleep(0.01)
    else:
        if PROGRESS.reaper_pid is not None:
            with contextlib.suppress(OSError):
                os.kill(PROGRESS.reaper_pid, signal.SIGKILL)
    with contextlib.suppress(Exception):  # it has done so, or was killed before
        from oomguard.supervisor.tree import remove_tree

        remove_tree(PROGRESS.folder or "")


def _become(command: Sequence[str], masked: set[int] | None, closed: frozenset[int]) -> int:
    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # what waits is for us; an ignored signal that waits is dropped only now
    for signal_number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(signal_number) is not signal.SIG_IGN or signal_number in {
                signal.SIGPIPE,
                signal.SIGXFSZ,
            }:
                signal.signal(signal_number, signal.SIG_DFL)
    with contextlib.suppress(OSError, ValueError):
        signal.pthread_sigmask(signal.SIG_SETMASK, masked or ())
    for number in closed:
        with contextlib.suppress(OSError):
            os.close(number)
    return become(command)


def become(command: Sequence[str]) -> int:
    """Become the command, as if oomguard were not there; return the status where that fails."""
    try:
        os.execvp(command[0], list(command))  # noqa: S606
    except FileNotFoundError:
        _say(f"oomguard: {command[0]}: command not found")
        return 127
    except (OSError, ValueError) as error:
        _say(f"oomguard: {command[0]}: {getattr(error, 'strerror', None) or error}")
        return 126


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode("utf-8", "backslashreplace"))
