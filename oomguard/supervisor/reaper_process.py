"""What the reaper does in its own process: start the command, pass signals on, reap, and end the
tree.
"""

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
from oomguard.supervisor.process_control import (
    become_subreaper,
    die_with_parent,
    set_command_line,
    set_name,
)
from oomguard.supervisor.signal_sets import (
    BY_KEY,
    JOB_STOPS,
    OF_TERMINAL,
    SI_KERNEL,
    STOPS,
    Before,
    handed_on,
    waits_once,
)
from oomguard.supervisor.terminal_modes import Modes, is_same, read_modes, set_modes

_HEADER: Final = struct.Struct("=I")
# Standard streams and a pseudo-terminal.
_MOST_DESCRIPTORS: Final = 4


def send(channel: socket.socket, message: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
    """Write one message, whole; raises OSError where nobody reads."""
    body = marshal.dumps(message)
    header = _HEADER.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
        channel.sendall(body)
    else:
        channel.sendall(header + body)


def receive(channel: socket.socket) -> tuple[tuple[Any, ...] | None, list[int]]:
    """Read one message and the descriptors that came with it; None at the end."""
    try:
        header, descriptors, _, _ = socket.recv_fds(channel, _HEADER.size, _MOST_DESCRIPTORS)
        for number in descriptors:
            os.set_inheritable(number, False)  # recv_fds leaves its flags argument out
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
_ELF: Final = b"\x7fELF"  # of another machine, or cut short
_STOPPED_MS: Final = 20
# With these systemd names the process for which its sockets, its watchdog and its journal are: the
# command.
_OF_A_SERVICE: Final = frozenset({b"LISTEN_PID", b"WATCHDOG_PID", b"SYSTEMD_EXEC_PID"})


def execute(argv: list[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    """Become the command.

    Raises:
        OSError: what stood in the way; of several folders in PATH the first that had such a file.
    """
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for path in _candidates(argv[0], env):
        try:
            _become(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):  # the next folder of PATH may have it
            if b"/" in argv[0]:
                raise
        except PermissionError as error:
            failure = error
    raise failure


def for_this_process(env: Mapping[bytes, bytes], named: int) -> dict[bytes, bytes]:
    """Return the environment with what systemd gave to the process ``named`` given to the calling
    one.
    """
    ours = str(os.getpid()).encode()
    theirs = str(named).encode()
    return {
        name: ours if name in _OF_A_SERVICE and value == theirs else value
        for name, value in env.items()
    }


def read_failure(told: int, pid: int) -> bytes:
    """Wait until a child has become the command, and return nothing, or the number of the error
    that it told instead.

    A child that is stopped on the way (Ctrl-Z) counts as the command: it goes on when it is
    continued.
    """
    poll = select.poll()
    poll.register(told, select.POLLIN)
    while not poll.poll(_STOPPED_MS):
        try:
            if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                return b""
        except ChildProcessError:  # it has ended, and cannot stop any more
            break
    return os.read(told, 16)  # nothing: the pipe closed because the command took over


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
        # POSIX asks this of execvp: text that the kernel does not know is the shell's.
        os.execve(_SHELL, [b"sh", path, *argv[1:]], env)  # noqa: S606


def _is_binary(path: bytes) -> bool:
    with open(path, "rb") as file:
        start = file.read(_LOOKED_AT_BYTES)
    return b"\0" in start or start.startswith(_ELF)


LOOK_MS: Final = 200


class HeldParent:
    """Hold a command as its watcher's parent is held.

    Args:
        parent: oomguard.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self.holds = False

    def look(self, command: int) -> None:
        """Stop the command where oomguard is stopped, and continue what was stopped so: its whole
        group where it leads one.
        """
        is_held = tree.is_stopped(self._parent)
        if is_held == self.holds or (is_held and tree.is_stopped(command)):
            return
        self.holds = is_held
        tree.send(tree.job_of(command), signal.SIGSTOP if is_held else signal.SIGCONT)

    def is_over(self) -> None:
        """Note that the command goes on: somebody has continued oomguard, which has
        handed it on.
        """
        self.holds = False


# A command alone has not handled the first of two that come so close to each other.
_TWIN_S: Final = 0.005


class RepeatedSignal:
    """Tell whether a signal repeats the one before it."""

    def __init__(self) -> None:
        self._last: tuple[int, int | None, float] = (0, None, 0.0)

    def is_second(self, number: int, sender: int | None, came_s: float) -> bool:
        """Return whether a sender's stop came just before; ``came_s`` in seconds of one clock."""
        before = self._last
        self._last = (number, sender, came_s)
        return (
            sender is not None
            and number in STOPS
            and before[:2] == (number, sender)
            and came_s - before[2] < _TWIN_S
        )


# The kernel and kill() reach the members of a group one after the other, within microseconds; a
# busy machine may part them.
_LATE_S: Final = 0.05
# A signal that we never asked about, since it merged with another at oomguard, is not taken for a
# later one.
_FORGOTTEN_S: Final = 2.0
_RECORD: Final = struct.Struct("iii")
# Not ours: who looks for oomguard by name means one process, and what all that match get would look
# like the group's. Who looks for the command's words (``pkill -f``) means the command too, which
# then has it already.
_NAME: Final = "group-witness"


class SignalSentinel:
    """The process, and what it told and nobody has asked about.

    Args:
        group: the process group that it joins.
        words: the command's, which its own command line shows.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, group: int, words: list[bytes]) -> None:
        self.group = group
        self._told: list[tuple[float, int, int, int]] = []
        self._had: dict[tuple[int, int, int | None], float] = {}
        self._looked_s = 0.0  # when it had nothing more to tell
        self._reader, writer = os.pipe()
        watcher = os.getpid()
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _serve(writer, watcher, group, words)
        finally:
            os.close(writer)

    def had(self, number: int, code: int, sender: int | None, came_s: float) -> bool:
        """Return whether the group has the signal of which oomguard was told by whom, how and when
        (monotonic) it came.

        Who signals oomguard and then its group (timeout) sends two that are one to a command alone:
        the second comes while it waits.
        """
        by_key = (
            code == SI_KERNEL and number in BY_KEY
        )  # of two quick ones it may have only the first
        # Those of a burst wait together: for one that came so long before the last look it is too
        # late now.
        deadline = time.monotonic() + (0.0 if came_s + _LATE_S <= self._looked_s else _LATE_S)
        while True:
            for told in self._told:
                if told[1] == number and (by_key or told[2:] == (code, sender)):
                    self._told.remove(told)
                    self._had = {
                        one: at_s for one, at_s in self._had.items() if came_s - at_s < _FORGOTTEN_S
                    }
                    self._had[number, code, sender] = came_s
                    return True
            if by_key:
                return True
            if not self._read(max(0.0, deadline - time.monotonic())):
                self._looked_s = time.monotonic()
                had_s = self._had.get((number, code, sender))
                return had_s is not None and came_s - had_s < _LATE_S and waits_once(number)

    def close(self) -> None:
        """End the process and take its status, once nothing of the command is left in the group.

        A process whose parent is of its session and of another group ties its own group to the
        session. Where the last tie of a group ends, the kernel hangs the group up if one of it is
        stopped (exit_notify in kernel/exit.c); who leaves first does not.
        """
        with contextlib.suppress(
            OSError
        ):  # it is gone, or the watcher leads a session by now: no tie
            os.setpgid(self.pid, os.getpgrp())
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # reaped with the others
            os.waitpid(self.pid, 0)
        os.close(self._reader)

    def _read(self, timeout_s: float) -> bool:
        """Read what it tells, once it does; return False where it tells nothing in time, or is
        gone.
        """
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        record = os.read(self._reader, _RECORD.size)
        now = time.monotonic()
        self._told = [told for told in self._told if now - told[0] < _FORGOTTEN_S]
        if len(record) == _RECORD.size:
            self._told.append((now, *_RECORD.unpack(record)))
        return bool(record)


def _serve(writer: int, watcher: int, group: int, words: list[bytes]) -> None:
    try:
        die_with_parent(watcher)
        os.setpgid(0, group)
        set_name(_NAME)
        set_command_line(b" ".join([_NAME.encode(), *words]))
        os.dup2(writer, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        numbers = handed_on()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        while True:
            info = signal.sigwaitinfo(numbers)
            os.write(3, _RECORD.pack(info.si_signo, info.si_code, info.si_pid))
    finally:
        os._exit(0)


class Given(NamedTuple):
    """The terminal that a command is started on.

    Attributes:
        theirs: its end of the pseudo-terminal.
        streams: the standard streams that it is.
        controls: whether the command is a job of a session on it.
        in_front: whether it begins in the foreground.
    """

    theirs: int
    streams: frozenset[int]
    controls: bool
    in_front: bool

    @property
    def words(self) -> tuple[tuple[int, ...], bool, bool]:
        """What the watcher is told with the descriptor."""
        return tuple(sorted(self.streams)), self.controls, self.in_front


class Lent:
    """Our user's terminal while oomguard has set it: the descriptor, its modes before, and those
    that oomguard set.
    """

    def __init__(self) -> None:
        self._own: tuple[int, Modes, Modes] | None = None

    def note(self, descriptors: list[int], saved: Modes | None, set_to: Modes | None) -> None:
        """Note what oomguard is about to set, without descriptors that it has set it back."""
        if self._own is not None:
            os.close(self._own[0])
        if descriptors and saved and set_to:
            self._own = (descriptors[0], saved, set_to)
        else:
            self._own = None

    def restore(self) -> None:
        """Set the terminal as it was where it still is as oomguard left it."""
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


class WatcherTerminal:
    """The watcher's side of one attempt's terminal."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._theirs: int | None = given.theirs

    @classmethod
    def of(
        cls, descriptors: list[int], words: tuple[tuple[int, ...], bool, bool] | None
    ) -> WatcherTerminal | None:
        """Return the terminal that came with a message; None without ``Given.words``."""
        if words is None:
            return None
        streams, controls, in_front = words
        return cls(Given(descriptors[0], frozenset(streams), controls, in_front))

    @property
    def controls(self) -> bool:
        """Whether the command is a job of our own session."""
        return self._given.controls

    def begin(self) -> None:
        """Lead a session that this terminal controls."""
        if self.controls:
            if os.getsid(0) != os.getpid():
                os.setsid()
            fcntl.ioctl(self._given.theirs, termios.TIOCSCTTY, 0)

    def become(self) -> dict[int, int]:
        """In the command's process: be a job of that session; return which descriptor each standard
        stream is.
        """
        if self.controls:
            os.setpgid(0, 0)
            if self._given.in_front:
                os.tcsetpgrp(self._given.theirs, os.getpid())
        return dict.fromkeys(self._given.streams, self._given.theirs)

    def bring(self, group: int) -> None:
        """Bring a process group to the foreground."""
        if self._theirs is not None:
            with contextlib.suppress(OSError):  # it has ended
                os.tcsetpgrp(self._theirs, group)

    def close(self) -> None:
        """Let go of the command's end once it has ended, so that ours sees the end of what was
        printed.
        """
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


AFTER_KILL_WAIT_S: Final = 2.0
REAPER_NAME: Final = "oomguard-watch"
_MOST_FAULTS: Final = 20
_PLAIN_MS: Final = 100


class WatcherProcess:
    """Serves oomguard until its end of the channel closes, then ends everything below.

    Where the command has a terminal of its own it leads the session of it. Else the command is in
    oomguard's process group, and so is a witness: a signal that it has too was sent to the group,
    so that the command has it already.
    """

    def __init__(self, channel: socket.socket, parent: int, before: Before) -> None:
        self._channel = channel
        self._parent = parent
        self._before = before
        self._child: int | None = None
        self._terminal: WatcherTerminal | None = None
        self._lent = Lent()
        self._told = False
        self._paused_parent = False
        self._times_gone_on = 0
        self._shares_group = False
        self._witness: SignalSentinel | None = None
        self._hurried = False
        self._folders: list[str] = []
        self._gone = False
        self._twin = RepeatedSignal()
        self._held = HeldParent(parent)
        self._last_status: int | None = None

    def run(self) -> NoReturn:
        """Serve to the end; never returns into what was forked."""
        try:
            self._serve()
            self._end_tree(AFTER_KILL_WAIT_S)
            for folder in self._folders:
                tree.remove_tree(folder)
        finally:
            is_running = self._child is not None
            os._exit(128 + signal.SIGKILL if is_running else self._last_status or 0)

    def _serve(self) -> None:
        """Serve until oomguard is gone; where that fails, take the command's status and leave it as
        our own.
        """
        faults = 0
        with contextlib.suppress(BaseException):
            self._prepare()
        while not self._gone:
            try:
                self._wait()
            except BaseException:  # noqa: BLE001
                # one message or one signal is lost, and the command goes on
                faults += 1
                if faults > _MOST_FAULTS:
                    break
        if not self._gone:
            self._last_status = self._serve_plainly()

    def _serve_plainly(self) -> int | None:
        """Wait for the command's end and hand stop signals on; return its status, None where
        oomguard goes first.
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
                # our own process
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
        # The reader of oomguard's output waits for nobody else, and what the command does not
        # inherit is not held open.
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        with contextlib.suppress(OSError):  # without /proc they stay
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
        if (
            self._channel.fileno() in ready
        ):  # first: what ended the command may have been told before it
            self._obey()
        elif self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            self._reap()
        elif self._child is not None and not self._paused_parent:
            self._held.look(self._child)

    def _obey(self) -> None:
        message, descriptors = receive(self._channel)
        match message:
            case ("start", words, variables, shares_group, targets, terminal):
                streams = dict(zip(targets, descriptors, strict=False))
                self._terminal = WatcherTerminal.of(descriptors[len(targets) :], terminal)
                self._start(words, variables, streams, shares_group=shares_group)
            case ("signal", number, code, sender, came_s):
                self._forward(number, code, sender, came_s)
            case ("lend", saved, set_to):
                self._lent.note(descriptors, saved, set_to)
            case ("go on", in_front):
                self._go_on(in_front=in_front)
            case ("key", number):
                self._told = self._told or (number in STOPS and self._child is not None)
            case ("kill",):
                self._hurried = True
                self._told = self._told or self._child is not None
                tree.kill(os.getpid(), but=self._witness_pid)
            case ("end", wait_s, spare_s):
                try:
                    self._end_tree(wait_s, spare_s=spare_s, hurried=self._is_hurried)
                finally:
                    self._say("ended", self._told)
            case ("folder", path):
                self._folders.append(path)
            case _:
                self._gone = True
                self._lent.restore()

    def _is_hurried(self) -> bool:
        """Read what came while the tree is ended: a kill, or the end of oomguard, which hurries
        nothing.
        """
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not self._gone and poll.poll(0):
            self._obey()
        return self._hurried

    def _start(
        self,
        words: list[bytes],
        variables: list[bytes],
        streams: dict[int, int],
        *,
        shares_group: bool,
    ) -> None:
        self._told = self._hurried = False
        self._last_status = None
        self._shares_group = shares_group
        if shares_group and self._witness is None:
            with contextlib.suppress(
                OSError
            ):  # no process can be started: the command's fork says so
                self._witness = SignalSentinel(os.getpgid(self._parent), words)
        failed, told = os.pipe()  # after the witness, which would hold it open
        own = os.getpid()
        try:
            if self._terminal is not None and self._terminal.controls:
                self._terminal.begin()
            else:
                with contextlib.suppress(OSError):
                    os.setpgid(0, 0)
            pid = os.fork()
        except OSError as error:
            os.close(told)
            pid = 0
            answer = str(error.errno or errno.EAGAIN).encode()
        else:
            if pid == 0:
                self._become(words, variables, streams, told, own, shares_group=shares_group)
            os.close(told)
            answer = read_failure(failed, pid)
        for number in (failed, *streams.values()):
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
        told: int,
        watcher: int,
        *,
        shares_group: bool,
    ) -> NoReturn:
        try:
            die_with_parent(watcher)
            if self._terminal is not None:
                streams = {**streams, **self._terminal.become()}
            if shares_group:
                with contextlib.suppress(OSError):
                    os.setpgid(0, os.getpgid(self._parent))
            elif os.getpgrp() != os.getpid():
                os.setpgid(0, 0)
            for target, number in streams.items():  # standard input may be ours
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
            os.write(told, str(error.errno or errno.EINVAL).encode())
        except BaseException:  # noqa: BLE001 - whatever failed in us, the command is started
            self._become_plainly(words, variables, streams)
        finally:
            os._exit(127)

    def _become_plainly(
        self, words: list[bytes], variables: list[bytes], streams: dict[int, int]
    ) -> None:
        """Become the command by plain system calls."""
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
        if self._child is None:  # ended of this very one, which its group had, or of its own
            self._told = self._told or (self._shares_group and number in STOPS)
            return
        group = os.getpgid(self._child)
        if self._witness is not None and group == self._witness.group:
            witness = self._witness
        else:
            witness = None
        if witness and code is not None:
            has_it = witness.had(number, code, sender, came_s)
        else:
            has_it = False
        if not has_it and not self._twin.is_second(number, sender, came_s):
            is_hangup = number == signal.SIGHUP and code == SI_KERNEL
            as_terminal = (number in OF_TERMINAL or is_hangup) and group == self._child
            tree.send(-group if as_terminal else self._child, number)
            if number == signal.SIGCONT:
                self._held.is_over()
        self._told = self._told or number in STOPS
        if number in STOPS and tree.is_stopped(self._child) and tree.heeds(self._child, number):
            tree.send(tree.job_of(self._child), signal.SIGCONT)

    def _is_job(self) -> bool:
        return self._shares_group and has_terminal()

    def _end_tree(
        self, wait_s: float, *, spare_s: float = 0.0, hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """End everything below, the witness last: what ends before it is not the last tie of the
        group.
        """
        if not tree.pids():  # nobody can tell it from the others
            self._end_witness()
        spared = self._witness_pid
        tree.end(
            os.getpid(), self._left, wait_s=wait_s, spare_s=spare_s, hurried=hurried, but=spared
        )
        self._end_witness()

    def _left(self) -> bool:
        """Reap; return whether a child but the witness is left."""
        return self._reap() and (
            self._witness is None or tree.descendants(os.getpid()) != [self._witness.pid]
        )

    @property
    def _witness_pid(self) -> int | None:
        if self._witness is None:
            return None
        return self._witness.pid

    def _end_witness(self) -> None:
        if self._witness is not None:
            self._witness.close()
            self._witness = None

    def _reap(self) -> bool:
        """Take the status of every child that ended or stopped; return whether any is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self._follow(status)
            elif self._witness is not None and pid == self._witness.pid and os.WIFSIGNALED(status):
                self._witness = None  # somebody killed it: what the group has arrives once more

    def _follow(self, status: int) -> None:
        """Tell oomguard that the command ended; stop and go on with it, so that a shell sees its
        job stopped.
        """
        if os.WIFSTOPPED(status):
            number = os.WSTOPSIG(status)
            if os.getppid() != self._parent or self._held.holds:
                return
            if self._terminal is not None and self._terminal.controls:
                self._paused_parent = (
                    True  # it stops by itself, once it has set its terminal as it was
                )
                self._say("stopped", number, self._times_gone_on)
            elif number in JOB_STOPS or (
                number == signal.SIGSTOP and self._is_job()
            ):  # a shell watches the group
                self._paused_parent = tree.send(self._parent, signal.SIGSTOP)
        elif os.WIFCONTINUED(status):
            if self._paused_parent and os.getppid() == self._parent:
                tree.send(self._parent, signal.SIGCONT)
            self._paused_parent = False
        else:
            self._child = None
            code = os.waitstatus_to_exitcode(status)
            self._last_status = 128 - code if code < 0 else code  # our own, where it cannot be told
            self._held.is_over()
            if self._paused_parent and os.getppid() == self._parent:
                tree.send(self._parent, signal.SIGCONT)  # nothing is left that could be continued
            self._paused_parent = False
            if self._terminal is not None:
                self._terminal.close()
            self._say("exited", status)

    def _go_on(self, *, in_front: bool) -> None:
        """Bring the command to the foreground of its terminal, or behind it, and continue it where
        it is stopped.
        """
        if self._child is not None and self._terminal is not None:
            self._terminal.bring(os.getpgid(self._child) if in_front else os.getpgrp())
            self._reap()
        self._times_gone_on += 1  # every stop until here is over
        self._paused_parent = False
        if self._child is not None and (self._held.holds or tree.is_stopped(self._child)):
            tree.send(-os.getpgid(self._child), signal.SIGCONT)
        self._held.is_over()

    def _say(self, *message: Any) -> None:
        with contextlib.suppress(OSError):
            send(self._channel, message)
