"""Keep the command running if the supervisor itself fails: its output and status survive.

``run_safely`` runs the supervisor. If that raises anything, or if its main loop hangs, this module
continues with a few plain system calls. If the command has not started, this process becomes the
command. Otherwise it copies the output, forwards stop signals, and takes the status. This code
calls nothing that may have failed.
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

# The main loop runs at least ten times a second.
TICK_S: Final = 1.0
STALLED_TICKS: Final = 10
_COPIED_BYTES: Final = 1 << 16
# Processes that outlive the command keep its pipes open; they are read for this long.
_DRAIN_S: Final = 2.0
_START_S: Final = 5.0
_KILLED_S: Final = 1.0
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class ReaperLostError(Exception):
    """Report a reaper that has not started the command, in words for the user."""


class SupervisorState:
    """Hold the progress of the supervisor.

    Attributes:
        beats: increases as long as the main loop runs.
        is_starting: whether the reaper has not answered a start request yet.
        channel: the socket to the reaper; None before it exists.
        reaper_pid: the reaper; None before it exists.
        command_pid: the running or last command; None before the first.
        outputs: its pipes or its terminal, each with the descriptor that gets the copy.
        inputs: descriptors with typed input, each with the terminal that gets the copy.
        folder: the temporary folder of this run, which the reaper removes.
        earlier: the exit status of the previous attempt; None without one.
        status: the exit status of the last ended command; None while it runs, or before it.
        wait_status: the same, as the reaper reported it.
        final: the exit status of the whole run; None until it is known.
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
    """Record that the main loop is running."""
    PROGRESS.beats += 1


def run_safely(
    words: Sequence[str], command: Sequence[str], ready: Callable[[], None] = lambda: None
) -> NoReturn:
    """Run the supervisor and exit with its status, or with the command's if it fails.

    Args:
        words: the command line between ``run`` and the command.
        command: the words of the command.
        ready: called when the watchdog runs.
    """
    # Blocking nothing returns the present mask, which the command has to inherit.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    closed: frozenset[int] = frozenset()
    try:
        _start_watchdog(command, masked)
        ready()
        # This comes first, because an opened file would take the place of a closed stream.
        closed = _occupy()
        from oomguard.supervisor.loop import Supervisor

        status = Supervisor(words, command, closed).run()
        os._exit(status)
    except ReaperLostError as error:
        _continue_alone(command, masked, closed, str(error))
    except BaseException as error:  # noqa: BLE001 - whatever failed, the command must not notice
        _continue_alone(command, masked, closed, f"{type(error).__name__}: {error}")


def _start_watchdog(command: Sequence[str], masked: set[int]) -> None:
    """Start the watchdog thread, which receives no signals."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # The run works without this thread if the system allows no more.
        with contextlib.suppress(RuntimeError):
            threading.Thread(
                target=_watch, name="oomguard-watchdog", args=(command, masked), daemon=True
            ).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)


def _occupy() -> frozenset[int]:
    """Put the null device in place of each closed standard stream; return the closed ones.

    Otherwise the next opened file would take the place.
    """
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            # open() returns the lowest free number, which is the closed stream's.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    return frozenset(closed)


def _watch(command: Sequence[str], masked: set[int]) -> None:
    """Take over if the main loop hangs. Stopping the whole process stops this clock too."""
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
            _continue_alone(command, masked, frozenset(), "its main loop hangs")


def _continue_alone(
    command: Sequence[str], masked: set[int] | None, closed: frozenset[int], why: str
) -> NoReturn:
    """Do the rest of a run without the supervisor, and exit."""
    status = PROGRESS.final
    try:
        if status is None:
            status = _finish_run(command, masked, closed, why)
    finally:
        # Not sys.exit(): Python's shutdown would wait for threads that may hang.
        os._exit(125 if status is None else status)


def _finish_run(
    command: Sequence[str], masked: set[int] | None, closed: frozenset[int], why: str
) -> int:
    """Do the rest of a run; return its exit status."""
    progress = PROGRESS
    reader = _Reader(progress.channel)
    if progress.is_starting and progress.status is None:
        if progress.reaper_pid is not None:
            # A stopped reaper cannot report the start, so continue it.
            with contextlib.suppress(OSError):
                os.kill(progress.reaper_pid, signal.SIGCONT)
        reader.read(_START_S, until_started=True)
    if progress.status is None and progress.wait_status is not None:
        progress.status = _as_shell(progress.wait_status)
    is_there = progress.command_pid is not None
    if not is_there and progress.status is None and progress.earlier is not None:
        progress.status = progress.earlier
    if not is_there and progress.status is None:
        _say(f"oomguard: oomguard failed, so the command runs without it: {why}")
        _end_reaper(wait_s=0.0)
        return _become(command, masked, closed)
    if progress.status is None:
        _say(f"oomguard: oomguard failed, so the command continues without it: {why}")
        progress.status = _copy(reader)
    else:
        _say(f"oomguard: oomguard failed, so it could not explain the failure: {why}")
    was_killed = not os.path.exists(f"/proc/{progress.reaper_pid}/exe")
    _end_reaper()
    if was_killed:
        _end_orphans()
    return progress.status


def _end_orphans(wait_s: float = 2.0) -> None:
    """Kill the processes that the command left, because the reaper was killed and they are ours."""
    from oomguard.supervisor.tree import LOOKS, descendants

    until_s = time.monotonic() + wait_s
    looks = 0
    while looks < LOOKS and time.monotonic() < until_s:
        left = descendants(os.getpid())
        looks = 0 if left else looks + 1
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.02)


class _Reader:
    """Read messages of the reaper: a length, then the message."""

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
        """Read until the reaper is gone or reports an end, for at most ``timeout_s`` seconds.

        With ``until_started``, a report of the start is enough.
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
            # our own process wrote this
            message, self._data = marshal.loads(self._data[4:end]), self._data[end:]  # noqa: S302
            if message[0] == "started":
                PROGRESS.command_pid = message[1]
            elif message[0] == "exited":
                self.status = _as_shell(message[1])


def _as_shell(wait_status: int) -> int:
    """Convert a wait status to a shell's exit status."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code < 0:
        return 128 - code
    return code


def _copy(reader: _Reader) -> int:
    """Copy the command's output until both end; return the command's status."""
    outputs = dict(PROGRESS.outputs)
    inputs = dict(PROGRESS.inputs)
    for number in _STOPS:
        with contextlib.suppress(OSError, ValueError):
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    ended_s: float | None = None
    while outputs or reader.status is None:
        _forward_stops()
        poll = select.poll()
        for fd in (*outputs, *inputs):
            poll.register(fd, select.POLLIN)
        if reader.status is None and not reader.is_gone:
            poll.register(reader.fileno(), select.POLLIN)
        for fd, _ in poll.poll(100):
            if fd == reader.fileno():
                reader.read(0)
            elif fd in inputs:
                if not _copy_once(fd, inputs[fd]):
                    del inputs[fd]
            elif not _copy_once(fd, outputs[fd]):
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


def _copy_once(source: int, sink: int) -> bool:
    """Copy the available bytes; return False at the end."""
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
        except OSError:
            # The reader is gone or the disk is full. The command continues without this copy.
            return bool(data)
    return bool(data)


def _status_of_zombie(reader: _Reader) -> int | None:
    """Return the status of a command whose reaper does not report it; None while it runs."""
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
    """Return the exit status of the reaper, which is the command's if it could not report."""
    try:
        _, status = os.waitpid(PROGRESS.reaper_pid or 0, os.WNOHANG)
    except OSError:
        return None
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    return None


def _forward_stops() -> None:
    """Forward pending stop signals to the command."""
    for number in _STOPS:
        if number in signal.sigpending():
            signal.sigtimedwait({number}, 0)
            with contextlib.suppress(OSError):
                os.kill(PROGRESS.command_pid or 0, number)


def _end_reaper(wait_s: float = 12.0) -> None:
    """Let the reaper stop all remaining processes and itself; kill it after ``wait_s`` seconds."""
    if PROGRESS.channel is not None:
        with contextlib.suppress(OSError):
            PROGRESS.channel.shutdown(2)
    pid = PROGRESS.reaper_pid
    if pid is not None and not _has_ended(pid, wait_s):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        _has_ended(pid, _KILLED_S)
    # Usually the reaper has removed the folder already.
    with contextlib.suppress(Exception):
        from oomguard.supervisor.tree import remove_tree

        remove_tree(PROGRESS.folder or "")


def _has_ended(pid: int, wait_s: float) -> bool:
    """Wait for a child for at most ``wait_s`` seconds; return whether it has ended."""
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def _become(command: Sequence[str], masked: set[int] | None, closed: frozenset[int]) -> int:
    # Let pending signals reach us first, because the command must not inherit them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
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
    """Become the command, as if oomguard were not there; return a status if that fails."""
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
