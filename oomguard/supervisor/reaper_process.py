"""Run the reaper process: start the command, forward signals, reap, and stop the tree."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import marshal
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from oomguard.supervisor import tree
from oomguard.supervisor.signal_sets import (
    BY_KEY,
    JOB_STOPS,
    OF_TERMINAL,
    SI_KERNEL,
    STOPS,
    InitialSignals,
    forwardable_signals,
    waits_once,
)
from oomguard.supervisor.terminal_modes import Modes, is_same, read_modes, set_modes
from oomguard.supervisor.tree import (
    become_subreaper,
    die_with_parent,
    set_command_line,
    set_name,
)

_HEADER: Final = struct.Struct("=I")
# Standard streams and a pseudo-terminal.
_MOST_DESCRIPTORS: Final = 4


def send(channel: socket.socket, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
    """Write one complete message.

    Raises:
        OSError: if the other end is closed.
    """
    body = marshal.dumps(message)
    header = _HEADER.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
        channel.sendall(body)
    else:
        channel.sendall(header + body)


def receive(channel: socket.socket) -> tuple[tuple[Any, ...] | None, list[int]]:
    """Read one message and its descriptors; None at the end."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MOST_DESCRIPTORS)
        for number in descriptors:
            # recv_fds() ignores its flags argument, so MSG_CMSG_CLOEXEC has no effect.
            os.set_inheritable(number, False)
        while header and len(header) < _HEADER.size:
            header += channel.recv(_HEADER.size - len(header))
        if not header:
            return None, []
        left = _HEADER.unpack(header)[0]
        parts = []
        while left:
            part = channel.recv(left)
            if not part:
                return None, descriptors
            parts.append(part)
            left -= len(part)
    except ConnectionError:
        return None, []
    return marshal.loads(b"".join(parts)), descriptors  # noqa: S302 - our own process wrote it


_SHELL: Final = b"/bin/sh"
_LOOKED_AT_BYTES: Final = 256
# An ELF file that cannot be executed is truncated, or for another machine.
_ELF: Final = b"\x7fELF"
_STOPPED_MS: Final = 20
# These variables name the process for systemd's sockets, watchdog and journal, which is the
# command.
_OF_A_SERVICE: Final = frozenset({b"LISTEN_PID", b"WATCHDOG_PID", b"SYSTEMD_EXEC_PID"})


def execute(argv: list[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    """Become the command.

    Raises:
        OSError: the reason why that failed; of several folders in PATH, the first with such a file.
    """
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in _candidates(argv[0], env):
        try:
            _become(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            # Another folder of PATH may have the command.
            if b"/" in argv[0]:
                raise
        except PermissionError as error:
            failure = error
    raise failure


def for_this_process(env: Mapping[bytes, bytes], named: int) -> dict[bytes, bytes]:
    """Return the environment with systemd's variables moved from process ``named`` to this one."""
    ours = str(os.getpid()).encode()
    theirs = str(named).encode()
    found = dict(env)
    for name in _OF_A_SERVICE:
        if found.get(name) == theirs:
            found[name] = ours
    return found


def read_failure(error_pipe: int, pid: int) -> bytes:
    """Wait until a child has become the command; return b"" or the number of its error.

    A child that is stopped meanwhile (Ctrl-Z) counts as the command, because it continues later.
    """
    poll = select.poll()
    poll.register(error_pipe, select.POLLIN)
    while not poll.poll(_STOPPED_MS):
        try:
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                return b""
        except ChildProcessError:
            # The child has ended and cannot stop any more.
            break
    # An empty answer means that exec closed the pipe, so the command runs.
    return os.read(error_pipe, 16)


def _candidates(name: bytes, env: Mapping[bytes, bytes]) -> list[bytes]:
    if not name or b"/" in name:
        if name:
            return [name]
        return []
    folders = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return [folder + b"/" + name if folder else name for folder in folders]


def _become(path: bytes, argv: list[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    try:
        os.execve(path, argv, env)  # noqa: S606
    except OSError as error:
        if error.errno != errno.ENOEXEC or _is_binary(path):
            raise
        # POSIX requires this of execvp: the shell runs text in an unknown format.
        os.execve(_SHELL, [b"sh", path, *argv[1:]], env)  # noqa: S606


def _is_binary(path: bytes) -> bool:
    with open(path, "rb") as file:
        start = file.read(_LOOKED_AT_BYTES)
    return b"\0" in start or start.startswith(_ELF)


LOOK_MS: Final = 200


class StopMirror:
    """Stop and continue the command together with oomguard.

    Args:
        parent: the process of oomguard.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.holds = False

    def look(self, command: int) -> None:
        """Stop the command if oomguard is stopped, and continue it later.

        If the command leads a process group, the whole group is stopped.
        """
        is_held = tree.is_stopped(self._parent)
        if is_held == self.holds or (is_held and tree.is_stopped(command)):
            return
        self.holds = is_held
        tree.send(tree.job_of(command), signal.SIGSTOP if is_held else signal.SIGCONT)

    def is_over(self) -> None:
        """Record that the command continues, because oomguard was continued and forwarded it."""
        self.holds = False


# A command has not handled the first of two signals that arrive this close together.
_TWIN_S: Final = 0.005


class RepeatedSignal:
    """Detect whether a signal repeats the one before it."""

    def __init__(self) -> None:
        self._last: tuple[int, int | None, float] = (0, None, 0.0)

    def is_second(self, number: int, sender: int | None, came_s: float) -> bool:
        """Return whether the same sender's stop came just before; ``came_s`` in seconds."""
        before = self._last
        self._last = (number, sender, came_s)
        return (
            sender is not None
            and number in STOPS
            and before[:2] == (number, sender)
            and came_s - before[2] < _TWIN_S
        )


# The kernel and kill() reach the members of a group within microseconds; on a busy machine it may
# take longer.
_LATE_S: Final = 0.05
_LATEST_S: Final = 1.0
# A signal that we never checked, because it merged with another one in oomguard, must not match a
# later one.
_FORGOTTEN_S: Final = 2.0
_RECORD: Final = struct.Struct("iii")
# The process has another name. A search for oomguard's name means one process, and a signal to all
# matches would look like a signal to the group. A search for the command's words (``pkill -f``)
# means the command too, which then has the signal already.
_NAME: Final = "group-witness"


class SignalSentinel:
    """Run a process in the command's group that records the signals of the group.

    Args:
        group: the process group that it joins.
        words: the words of the command, which its own command line shows.

    Raises:
        OSError: if no process can be started.
    """

    def __init__(self, group: int, words: list[bytes]) -> None:
        self.group = group
        self._records: list[tuple[float, int, int, int]] = []
        self._had: dict[tuple[int, int, int | None], float] = {}
        # when it last had nothing to report
        self._looked_s = 0.0
        self._reader, writer = os.pipe()
        reaper = os.getpid()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _serve(writer, reaper, group, words)
        finally:
            os.close(writer)

    def had(self, number: int, code: int, sender: int | None, came_s: float) -> bool:
        """Return whether the group got a signal that oomguard got too.

        Args:
            number: the signal.
            code: how it was sent.
            sender: the process that sent it; None if unknown.
            came_s: when oomguard got it, on the monotonic clock.

        A program that signals oomguard and then its group (timeout) sends two signals that merge
        for a single command: the second one arrives while the first one is pending.
        """
        # The kernel sends a key to the whole group, although the sentinel may get only one of two.
        by_key = code == SI_KERNEL and number in BY_KEY
        # Signals of a burst wait together, so a signal from long before the last check is too late
        # now.
        deadline = time.monotonic() + (0.0 if came_s + _LATE_S <= self._looked_s else _LATE_S)
        while True:
            for record in self._records:
                if record[1] == number and (by_key or record[2:] == (code, sender)):
                    self._records.remove(record)
                    for one, at_s in list(self._had.items()):
                        if came_s - at_s >= _FORGOTTEN_S:
                            del self._had[one]
                    self._had[number, code, sender] = came_s
                    return True
            if by_key:
                return True
            if not self._read(max(0.0, deadline - time.monotonic())):
                # On a busy machine the process may not have run since the signal came.
                is_early = time.monotonic() - came_s < _LATEST_S
                if is_early and tree.is_busy_with(self.pid, number):
                    deadline = time.monotonic() + _LATE_S
                    continue
                self._looked_s = time.monotonic()
                had_s = self._had.get((number, code, sender))
                return had_s is not None and came_s - had_s < _LATE_S and waits_once(number)

    def close(self) -> None:
        """Stop the process, after the last process of the command has left the group.

        A process whose parent is in its session but in another group ties its own group to the
        session. When the last tie of a group ends and one of its members is stopped, the kernel
        hangs the group up (exit_notify in kernel/exit.c). A process that leaves the group first
        does not trigger that.
        """
        # If the sentinel is gone, or the reaper leads a session, there is no tie to keep.
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, os.getpgrp())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # The sentinel may have been reaped with the others.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._reader)

    def _read(self, timeout_s: float) -> bool:
        """Read its next record; return False if none comes in time, or if it is gone."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        data = os.read(self._reader, _RECORD.size)
        now = time.monotonic()
        while self._records and now - self._records[0][0] >= _FORGOTTEN_S:
            del self._records[0]
        if len(data) == _RECORD.size:
            self._records.append((now, *_RECORD.unpack(data)))
        return bool(data)


def _serve(writer: int, reaper: int, group: int, words: list[bytes]) -> None:
    try:
        die_with_parent(reaper)
        os.setpgid(0, group)
        set_name(_NAME)
        set_command_line(b" ".join([_NAME.encode(), *words]))
        os.dup2(writer, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        numbers = forwardable_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        while True:
            info = signal.sigwaitinfo(numbers)
            os.write(3, _RECORD.pack(info.si_signo, info.si_code, info.si_pid))
    finally:
        os._exit(0)


class ChildTerminal(NamedTuple):
    """Describe the terminal that a command starts on.

    Attributes:
        theirs: the command's end of the pseudo-terminal.
        streams: the standard streams on it.
        controls: whether the command is a job of a session on it.
        in_front: whether it begins in the foreground.
    """

    theirs: int
    streams: frozenset[int]
    controls: bool
    in_front: bool

    @property
    def words(self) -> tuple[tuple[int, ...], bool, bool]:
        """The message to the reaper, sent together with the descriptor."""
        return tuple(sorted(self.streams)), self.controls, self.in_front


class TerminalBackup:
    """Remember how oomguard set the user's terminal: descriptor, modes before, and new modes."""

    def __init__(self) -> None:
        self._own: tuple[int, Modes, Modes] | None = None

    def note(self, descriptors: list[int], saved: Modes | None, set_to: Modes | None) -> None:
        """Record how oomguard will set the terminal; without descriptors, it has restored it."""
        if self._own is not None:
            os.close(self._own[0])
        if descriptors and saved and set_to:
            self._own = (descriptors[0], saved, set_to)
        else:
            self._own = None

    def restore(self) -> None:
        """Restore the terminal if it is still as oomguard set it."""
        if self._own is not None:
            fd, saved, set_to = self._own
            modes = read_modes(fd)
            if modes is not None and is_same(modes, set_to):
                set_modes(fd, saved)


def has_terminal() -> bool:
    """Return whether a terminal controls the session."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class ReaperTerminal:
    """Hold the reaper's side of one attempt's terminal."""

    def __init__(self, given: ChildTerminal) -> None:
        self._given = given
        self._theirs: int | None = given.theirs

    @classmethod
    def of(
        cls, descriptors: list[int], words: tuple[tuple[int, ...], bool, bool] | None
    ) -> ReaperTerminal | None:
        """Return the terminal that came with a message; None without ``words``."""
        if words is None:
            return None
        streams, controls, in_front = words
        return cls(ChildTerminal(descriptors[0], frozenset(streams), controls, in_front))

    @property
    def controls(self) -> bool:
        """Whether the command is a job of our own session."""
        return self._given.controls

    def begin(self) -> None:
        """Start a session that this terminal controls."""
        if self.controls:
            if os.getsid(0) != os.getpid():
                os.setsid()
            fcntl.ioctl(self._given.theirs, termios.TIOCSCTTY, 0)

    def become(self) -> dict[int, int]:
        """Make the command's process a job of that session; return its descriptor by stream."""
        if self.controls:
            os.setpgid(0, 0)
            if self._given.in_front:
                os.tcsetpgrp(self._given.theirs, os.getpid())
        return dict.fromkeys(self._given.streams, self._given.theirs)

    def bring(self, group: int) -> None:
        """Bring a process group to the foreground."""
        if self._theirs is not None:
            # The group may have ended meanwhile.
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._theirs, group)

    def close(self) -> None:
        """Close the command's end after its exit, so that our end sees the end of the output."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


AFTER_KILL_WAIT_S: Final = 2.0
REAPER_NAME: Final = "oomguard-watch"
_MOST_FAULTS: Final = 20
_PLAIN_MS: Final = 100


class ReaperProcess:
    """Serve oomguard until the socket closes, and then stop everything below.

    If the command has its own terminal, this process leads its session. Otherwise the command is in
    oomguard's process group together with a sentinel. A signal that reaches the sentinel too was
    sent to the group, so the command has it already.
    """

    def __init__(self, channel: socket.socket, parent: int, before: InitialSignals) -> None:
        self._channel = channel
        self._parent = parent
        self._before = before
        self._child: int | None = None
        self._terminal: ReaperTerminal | None = None
        self._terminal_backup = TerminalBackup()
        self._got_stop = False
        self._paused_parent = False
        self._resume_count = 0
        self._shares_group = False
        self._sentinel: SignalSentinel | None = None
        self._is_urgent = False
        self._folders: list[str] = []
        self._gone = False
        self._repeats = RepeatedSignal()
        self._stop_mirror = StopMirror(parent)
        self._last_status: int | None = None

    def run(self) -> NoReturn:
        """Serve to the end; never returns into the forked program."""
        try:
            self._serve()
            self._end_tree(AFTER_KILL_WAIT_S)
            for folder in self._folders:
                tree.remove_tree(folder)
        finally:
            is_running = self._child is not None
            os._exit(128 + signal.SIGKILL if is_running else self._last_status or 0)

    def _serve(self) -> None:
        """Serve until oomguard is gone; after too many errors, only wait for the command."""
        faults = 0
        with contextlib.suppress(BaseException):
            self._prepare()
        while not self._gone:
            try:
                self._wait()
            except BaseException:  # noqa: BLE001
                # one message or one signal is lost, but the command continues
                faults += 1
                if faults > _MOST_FAULTS:
                    break
        if not self._gone:
            self._last_status = self._serve_plainly()

    def _serve_plainly(self) -> int | None:
        """Wait for the command's end and forward stop signals.

        Returns:
            Its status; None if oomguard ends first.
        """
        child = self._child
        data = b""
        while child is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                if code < 0:
                    return 128 - code
                return code
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            if not poll.poll(_PLAIN_MS):
                continue
            received = self._channel.recv(1 << 16)
            if not received:
                self._gone = True
                return None
            data += received
            while (
                len(data) >= _HEADER.size
                and len(data) >= _HEADER.size + _HEADER.unpack_from(data)[0]
            ):
                end = _HEADER.size + _HEADER.unpack_from(data)[0]
                # our own process wrote this
                message, data = marshal.loads(data[_HEADER.size : end]), data[end:]  # noqa: S302
                number = {
                    "signal": message[1] if len(message) > 1 else 0,
                    "kill": signal.SIGKILL,
                }.get(message[0])
                if number is not None:
                    with contextlib.suppress(OSError):
                        os.kill(child, number)
        return None

    def _prepare(self) -> None:
        gc.disable()
        set_name(REAPER_NAME)
        become_subreaper()
        # Close inherited descriptors, so that the end of oomguard's output
        # does not wait for the reaper.
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        # Without /proc the inherited descriptors stay open.
        with contextlib.suppress(OSError):
            for number in [int(name) for name in os.listdir("/proc/self/fd")]:
                with contextlib.suppress(OSError):
                    if number != self._channel.fileno() and not os.get_inheritable(number):
                        os.close(number)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        ready = {number for number, _ in poll.poll(None if self._child is None else LOOK_MS)}
        # Messages come first, because a forwarded signal may be what ended the command.
        if self._channel.fileno() in ready:
            self._obey()
        elif self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        elif self._child is not None and not self._paused_parent:
            self._stop_mirror.look(self._child)

    def _obey(self) -> None:
        message, descriptors = receive(self._channel)
        match message:
            case ("start", words, variables, shares_group, targets, terminal):
                if len(descriptors) < len(targets) + (terminal is not None):
                    # the kernel drops descriptors beyond the limit
                    for number in descriptors:
                        os.close(number)
                    self._say("failed", errno.EMFILE)
                    return
                streams = dict(zip(targets, descriptors, strict=False))
                self._terminal = ReaperTerminal.of(descriptors[len(targets) :], terminal)
                self._start(words, variables, streams, shares_group=shares_group)
            case ("signal", number, code, sender, came_s):
                self._forward(number, code, sender, came_s)
            case ("terminal", saved, set_to):
                self._terminal_backup.note(descriptors, saved, set_to)
            case ("resume", in_front):
                self._go_on(in_front=in_front)
            case ("key", number):
                self._got_stop = self._got_stop or (number in STOPS and self._child is not None)
            case ("kill",):
                self._is_urgent = True
                self._got_stop = self._got_stop or self._child is not None
                tree.kill(os.getpid(), exempt=self._sentinel_pid)
            case ("end", wait_s, spare_s):
                try:
                    self._end_tree(wait_s, spare_s=spare_s, is_urgent=self._is_urgent_now)
                finally:
                    self._say("ended", self._got_stop)
            case ("folder", path):
                self._folders.append(path)
            case _:
                self._gone = True
                self._terminal_backup.restore()

    def _is_urgent_now(self) -> bool:
        """Read messages that arrive while the tree is stopped: a kill, or oomguard's end."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._gone and poll.poll(0):
            self._obey()
        return self._is_urgent

    def _start(
        self,
        words: list[bytes],
        variables: list[bytes],
        streams: dict[int, int],
        *,
        shares_group: bool,
    ) -> None:
        self._got_stop = self._is_urgent = False
        self._last_status = None
        self._shares_group = shares_group
        if shares_group and self._sentinel is None:
            # If no process can be started, the command's fork reports it.
            with contextlib.suppress(OSError):
                self._sentinel = SignalSentinel(os.getpgid(self._parent), words)
        own = os.getpid()
        pipe: tuple[int, ...] = ()
        pid = 0
        try:
            # Created after the sentinel, which would inherit the pipe and keep it open.
            pipe = os.pipe()
            if self._terminal is not None and self._terminal.controls:
                self._terminal.begin()
            else:
                with contextlib.suppress(OSError):
                    os.setpgid(0, 0)
            pid = os.fork()
        except OSError as error:
            answer = str(error.errno or errno.EAGAIN).encode()
        else:
            if pid == 0:
                self._become(words, variables, streams, pipe[1], own, shares_group=shares_group)
            os.close(pipe[1])
            answer = read_failure(pipe[0], pid)
            pipe = pipe[:1]
        for number in (*pipe, *streams.values()):
            os.close(number)
        if answer:
            self._reap()
            if self._terminal is not None:
                self._terminal.close()
            self._say("failed", int(answer))
        else:
            self._child = pid
            self._say("started", pid)

    def _become(
        self,
        words: list[bytes],
        variables: list[bytes],
        streams: dict[int, int],
        error_pipe: int,
        reaper: int,
        *,
        shares_group: bool,
    ) -> NoReturn:
        try:
            die_with_parent(reaper)
            if self._terminal is not None:
                streams = {**streams, **self._terminal.become()}
            if shares_group:
                with contextlib.suppress(OSError):
                    os.setpgid(0, os.getpgid(self._parent))
            elif os.getpgrp() != os.getpid():
                os.setpgid(0, 0)
            # A stream without a descriptor of its own is the reaper's, which is oomguard's.
            for target, number in streams.items():
                os.dup2(number, target)
            for number in self._before.closed:
                os.close(number)
            signal.set_wakeup_fd(-1)
            ignored = self._before.ignored_by(
                is_job=self._terminal is not None and self._terminal.controls
            )
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before.masked)
            env = dict(variable.split(b"=", 1) for variable in variables)
            execute(words, for_this_process(env, self._parent))
        except OSError as error:
            os.write(error_pipe, str(error.errno or errno.EINVAL).encode())
        except BaseException:  # noqa: BLE001 - whatever failed in us, the command must start
            self._become_plainly(words, variables, streams)
        finally:
            os._exit(127)

    def _become_plainly(
        self, words: list[bytes], variables: list[bytes], streams: dict[int, int]
    ) -> None:
        """Become the command with plain system calls."""
        for target, number in streams.items():
            os.dup2(number, target)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(
                number, signal.SIG_IGN if number in self._before.ignored else signal.SIG_DFL
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.masked)
        os.execvpe(words[0], words, dict(variable.split(b"=", 1) for variable in variables))  # noqa: S606

    def _forward(self, number: int, code: int | None, sender: int | None, came_s: float) -> None:
        self._reap()
        # The command has ended: from this signal, which its group got, or on its own.
        if self._child is None:
            self._got_stop = self._got_stop or (self._shares_group and number in STOPS)
            return
        group = os.getpgid(self._child)
        if self._sentinel is not None and group == self._sentinel.group:
            sentinel = self._sentinel
        else:
            sentinel = None
        if sentinel and code is not None:
            has_it = sentinel.had(number, code, sender, came_s)
        else:
            has_it = False
        if not has_it and not self._repeats.is_second(number, sender, came_s):
            is_hangup = number == signal.SIGHUP and code == SI_KERNEL
            as_terminal = (number in OF_TERMINAL or is_hangup) and group == self._child
            tree.send(-group if as_terminal else self._child, number)
            if number == signal.SIGCONT:
                self._stop_mirror.is_over()
        self._got_stop = self._got_stop or number in STOPS
        if number in STOPS and tree.is_stopped(self._child) and tree.heeds(self._child, number):
            tree.send(tree.job_of(self._child), signal.SIGCONT)

    def _is_job(self) -> bool:
        return self._shares_group and has_terminal()

    def _end_tree(
        self, wait_s: float, *, spare_s: float = 0.0, is_urgent: Callable[[], bool] = lambda: False
    ) -> None:
        """Stop everything below, the sentinel last.

        No earlier end is then the last tie of the group.
        """
        # Without /proc the sentinel cannot be distinguished from the command's processes.
        if not tree.pids():
            self._end_sentinel()
        spared = self._sentinel_pid
        tree.end(
            os.getpid(),
            self._left,
            wait_s=wait_s,
            spare_s=spare_s,
            is_urgent=is_urgent,
            exempt=spared,
        )
        self._end_sentinel()

    def _left(self) -> bool:
        """Reap; return whether a child other than the sentinel is left."""
        return self._reap() and (
            self._sentinel is None or tree.descendants(os.getpid()) != [self._sentinel.pid]
        )

    @property
    def _sentinel_pid(self) -> int | None:
        if self._sentinel is None:
            return None
        return self._sentinel.pid

    def _end_sentinel(self) -> None:
        if self._sentinel is not None:
            self._sentinel.close()
            self._sentinel = None

    def _reap(self) -> bool:
        """Take the status of every ended or stopped child; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self._follow(status)
            elif (
                self._sentinel is not None and pid == self._sentinel.pid and os.WIFSIGNALED(status)
            ):
                # the sentinel was killed, so signals to the group now arrive twice
                self._sentinel = None

    def _follow(self, status: int) -> None:
        """Report the command's end, or stop together with it.

        A shell then sees a stopped job.
        """
        if os.WIFSTOPPED(status):
            number = os.WSTOPSIG(status)
            if os.getppid() != self._parent or self._stop_mirror.holds:
                return
            if self._terminal is not None and self._terminal.controls:
                self._paused_parent = (
                    True  # oomguard stops itself after it has restored its terminal
                )
                self._say("stopped", number, self._resume_count)
            elif number in JOB_STOPS or (number == signal.SIGSTOP and self._is_job()):
                # A shell watches the group, so oomguard has to stop with the command.
                self._paused_parent = tree.send(self._parent, signal.SIGSTOP)
        elif os.WIFCONTINUED(status):
            if self._paused_parent and os.getppid() == self._parent:
                tree.send(self._parent, signal.SIGCONT)
            self._paused_parent = False
        else:
            self._child = None
            code = os.waitstatus_to_exitcode(status)
            # our own status, if it cannot be reported
            self._last_status = 128 - code if code < 0 else code
            self._stop_mirror.is_over()
            if self._paused_parent and os.getppid() == self._parent:
                # The command is gone, so a later CONT could not wake us.
                tree.send(self._parent, signal.SIGCONT)
            self._paused_parent = False
            if self._terminal is not None:
                self._terminal.close()
            self._say("exited", status)

    def _go_on(self, *, in_front: bool) -> None:
        """Move the command to the foreground or background of its terminal, and continue it."""
        if self._child is not None and self._terminal is not None:
            self._terminal.bring(os.getpgid(self._child) if in_front else os.getpgrp())
            self._reap()
        # The reaper's reports of earlier stops are out of date from here on.
        self._resume_count += 1
        self._paused_parent = False
        if self._child is not None and (self._stop_mirror.holds or tree.is_stopped(self._child)):
            tree.send(-os.getpgid(self._child), signal.SIGCONT)
        self._stop_mirror.is_over()

    def _say(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            send(self._channel, message)
