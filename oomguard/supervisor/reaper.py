"""Control the reaper, a small process above the command that survives a kill of oomguard.

It is forked before anything heavy is loaded, and starts the command with the original signals. It
adopts and reaps every orphan below the command. It stops the whole tree on request, or when
oomguard is gone, because the socket between them then closes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from oomguard.supervisor import tree
from oomguard.supervisor.failsafe import PROGRESS, ReaperLostError, beat
from oomguard.supervisor.reaper_process import ChildTerminal, ReaperProcess, receive, send
from oomguard.supervisor.signal_sets import InitialSignals
from oomguard.supervisor.streams import has_no_reader, is_one_stream, writable
from oomguard.supervisor.terminal_modes import Modes

# A reaper that is silent for this long has failed, and one that leaves a zombie for this long does
# not reap.
_START_S: Final = 10.0
_REAP_S: Final = 3.0
# Errors of a limit that the command alone may not reach, and the shell's command that shows the
# limit.
_LIMITS: Final = {
    errno.EAGAIN: "ulimit -u",
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "sysctl fs.file-max",
    errno.ENOMEM: "ulimit -v",
}
# wait status of a command that was killed together with its reaper
_LOST: Final = 9


class Child:
    """Follow the running command; ``returncode`` is None until the reaper reports its end.

    ``outputs`` are the pipes of standard output (1) and error (2), without streams on a terminal.
    They are closed if our own stream has no reader.
    """

    def __init__(self, pid: int, outputs: dict[int, IO[bytes]], reaper: Reaper) -> None:
        self.pid = pid
        self.outputs = outputs
        self.reaper = reaper
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (-n for signal n); None while it runs."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> int | None:
        """Wait at most ``timeout_s`` seconds for the exit code; None while it runs."""
        if self.returncode is None and (status := self.reaper.exit_status(timeout_s)) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Reaper:
    """Start and control the reaper process.

    Args:
        before: the signals and streams that the command starts with.

    Attributes:
        command_pid: the last started command; None before the first.
        exempt_pid: a child of ours that is not part of the command; None without one.
    """

    def __init__(self, before: InitialSignals) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        # The collector would touch every object, and so copy the pages that a fork shares.
        gc.freeze()
        # Python warns of a fork with threads. This child uses no locks of theirs.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            ReaperProcess(theirs, parent, before).run()
        gc.unfreeze()
        theirs.close()
        self._channel = ours
        PROGRESS.channel = ours
        PROGRESS.reaper_pid = self.pid
        self._closed = before.closed
        self._sending = threading.Lock()
        self._status: int | None = None
        self._stopped_by: int | None = None
        self._resume_count = 0
        self._lost = self._was_killed = False
        self._zombie_since_s: float | None = None
        self._adopted: set[int] = set()
        self._empty_looks = 0
        self.command_pid: int | None = None
        self.exempt_pid: int | None = None

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        shares_group: bool,
        stdin: int | None = None,
        terminal: ChildTerminal | None = None,
    ) -> Child:
        """Start the command with its output in pipes.

        Args:
            argv: the command.
            env: its complete environment.
            shares_group: whether it is in our process group.
            stdin: its standard input; None for our own.
            terminal: replaces the streams that it names; None for no terminal.

        Raises:
            OSError: if it cannot be started.
            ValueError: if a word or a variable contains a NUL.
        """
        words = [os.fsencode(word) for word in argv]
        variables = [os.fsencode(f"{name}={value}") for name, value in env.items()]
        if any(b"\0" in text for text in (*words, *variables)):
            raise ValueError("embedded null byte")
        if terminal is not None:
            of_terminal = terminal.streams
        else:
            of_terminal = frozenset()
        try:
            outputs, targets, writers = self._pipes({1, 2} - of_terminal - self._closed)
        except OSError as error:
            raise _lost(error.errno or errno.EMFILE) from None
        if stdin is not None:
            targets[0] = stdin
        given = ((terminal.theirs,), terminal.words) if terminal is not None else ((), None)
        try:
            self._status = self._stopped_by = self._zombie_since_s = None
            PROGRESS.earlier = PROGRESS.status
            PROGRESS.status = PROGRESS.wait_status = PROGRESS.command_pid = None
            PROGRESS.inputs = {}
            PROGRESS.outputs = {}
            for number, pipe in outputs.items():
                if not pipe.closed:
                    PROGRESS.outputs[pipe.fileno()] = number
            PROGRESS.is_starting = True
            message = ("start", words, variables, shares_group, tuple(targets), given[1])
            self._say(*message, descriptors=(*targets.values(), *given[0]))
            answer = self._answer_in(_START_S)
        finally:
            for writer in writers:
                os.close(writer)
        if answer is None and (pid := self._started_without_answer()) is not None:
            answer = ("started", pid)
        # The command may have killed the reaper as its first act.
        if answer is None and self._was_killed:
            PROGRESS.status = 128 + signal.SIGKILL
            raise ReaperLostError("the reaper was killed")
        if answer is None:
            raise ReaperLostError("the reaper does not start the command")
        PROGRESS.is_starting = False
        if answer[0] == "failed":
            for pipe in outputs.values():
                pipe.close()
            # The limit holds for the reaper. This process can still become the command.
            if answer[1] in _LIMITS:
                raise _lost(answer[1])
            raise OSError(answer[1], os.strerror(answer[1]))
        self.command_pid = PROGRESS.command_pid = answer[1]
        self._adopted.add(answer[1])
        return Child(answer[1], outputs, self)

    @staticmethod
    def _pipes(given_on: set[int]) -> tuple[dict[int, IO[bytes]], dict[int, int], list[int]]:
        """Create pipes for standard output and error if these are writable.

        Returns:
            Our ends by stream, the command's descriptors by stream, and its ends of the pipes.
        """
        ours = given_on & writable()
        is_one = ours == {1, 2} and is_one_stream()
        # Both streams share one pipe, so that output to both keeps its order.
        if is_one:
            piped = [1]
        else:
            piped = sorted(ours)
        pipes = {number: os.pipe() for number in piped}
        targets = {number: writer for number, (_, writer) in pipes.items()}
        targets |= {number: number for number in given_on - ours}
        if is_one:
            targets[2] = targets[1]
        for number, (_, writer) in pipes.items():
            os.set_blocking(writer, os.get_blocking(number))
        outputs: dict[int, IO[bytes]] = {}
        for number, (reader, _) in pipes.items():
            outputs[number] = os.fdopen(reader, "rb", buffering=0)
            if has_no_reader(number):
                # The command's first write then fails, as it would on our own stream.
                outputs[number].close()
        return outputs, targets, [writer for _, writer in pipes.values()]

    def exit_status(self, timeout_s: float) -> int | None:
        """Return the command's wait status; None if it still runs after ``timeout_s`` seconds."""
        if self._status is None and not self._lost:
            deadline = time.monotonic() + timeout_s
            while (
                self._status is None
                and not self._lost
                and self._readable(deadline - time.monotonic())
            ):
                self._answer()
        if self._lost and self._status is None:
            return _LOST
        return self._status

    @property
    def exited(self) -> bool:
        """Whether the last command ended on its own, not by a signal."""
        return self._status is not None and os.WIFEXITED(self._status)

    @property
    def is_lost(self) -> bool:
        """Whether the reaper is gone, so that it cannot start anything."""
        return self._lost

    def forward(self, number: int, code: int | None, sender: int | None) -> None:
        """Forward a signal to the command, unless its process group got the same signal.

        A ``code`` of None always forwards it.
        """
        self._say("signal", number, code, sender, time.monotonic())

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message of the reaper waits."""
        return self._channel.fileno()

    def stopped_by(self) -> int | None:
        """Return once which signal stopped a command on its own terminal.

        ``exit_status`` must have read the reaper's report before.
        """
        number = self._stopped_by
        self._stopped_by = None
        return number

    def resume(self, *, in_front: bool) -> None:
        """Continue such a stopped command, in the foreground or background of its terminal."""
        self._resume_count += 1
        self._say("resume", in_front)

    def back_up_terminal(self, terminal: int, saved: Modes, set_to: Modes) -> None:
        """Report to the reaper how oomguard will set the terminal.

        The reaper restores it if we are killed.
        """
        self._say("terminal", saved, set_to, descriptors=(terminal,))

    def drop_terminal_backup(self) -> None:
        """Report to the reaper that oomguard has restored the terminal."""
        self._say("terminal", None, None)

    def report_stop_key(self, number: int) -> None:
        """Report that the command is about to get a signal from a key of its own terminal."""
        self._say("key", number)

    def kill(self) -> None:
        """Kill the whole tree now."""
        self._say("kill")

    def end(self, wait_s: float, *, spare_s: float = 0.0) -> bool:
        """Stop the remaining processes after ``spare_s`` seconds.

        Returns:
            Whether the command itself got a stop while it lived.
        """
        self._say("end", wait_s, spare_s)
        until_s = time.monotonic() + wait_s + spare_s + tree.KILL_WAIT_S + _START_S
        while (answer := self._answer_in(until_s - time.monotonic())) is not None:
            if answer[0] == "ended":
                return bool(answer[1])
        self.replace()
        # The reaper was killed, so its orphans are ours now. They are reaped by number, because
        # other children are not ours to wait for.
        tree.end(os.getpid(), self._reap_adopted, wait_s=wait_s, exempt=self.exempt_pid)
        return True

    def check_health(self) -> None:
        """Replace the reaper if it does not reap the ended command."""
        if self._status is not None or self._lost or self.command_pid is None:
            return
        # No shell knows the reaper, so no one else would continue it.
        if tree.is_stopped(self.pid):
            tree.send(self.pid, signal.SIGCONT)
        if not tree.is_zombie(self.command_pid):
            self._zombie_since_s = None
        elif self._zombie_since_s is None:
            self._zombie_since_s = time.monotonic()
        elif time.monotonic() - self._zombie_since_s > _REAP_S:
            self.replace()

    def replace(self) -> None:
        """Kill a reaper that does not answer, with its children; this process reaps them next."""
        for pid in (*tree.descendants(self.pid), self.pid):
            tree.send(pid, signal.SIGKILL)
        self._lost = True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        if self._status is None and self.command_pid is not None:
            with contextlib.suppress(ChildProcessError):
                self._status = os.waitpid(self.command_pid, 0)[1]

    def remove_at_end(self, folder: str) -> None:
        """Let the reaper remove a folder when oomguard has ended, in any way."""
        self._say("folder", folder)

    def close(self) -> None:
        """Let the reaper stop all remaining processes and itself."""
        PROGRESS.channel = None
        self._channel.close()
        # SIGCHLD is ignored, so there is nothing to wait for
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _say(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        # If the reaper was killed, the wait for its answer detects that.
        with (
            self._sending,
            contextlib.suppress(OSError),
        ):
            send(self._channel, message, descriptors)

    def _answer_in(self, timeout_s: float) -> tuple[Any, ...] | None:
        """Return the reaper's next message; None if it is gone or sends nothing in time."""
        until_s = time.monotonic() + timeout_s
        while not self._lost:
            beat()
            if self._readable(min(0.5, until_s - time.monotonic())):
                return self._answer()
            if time.monotonic() > until_s:
                return None
        return None

    def _started_without_answer(self) -> int | None:
        """Return a command whose start the reaper has not reported; None without one."""
        for pid in tree.children(self.pid):
            if not tree.is_like(pid, os.getpid()):
                return pid
        return None

    def _answer(self) -> tuple[Any, ...] | None:
        answer, _ = receive(self._channel)
        if answer is None:
            # The reaper was killed together with the command, or its status is the command's.
            self._lost = True
            with contextlib.suppress(ChildProcessError):
                _, status = os.waitpid(self.pid, 0)
                self._was_killed = os.WIFSIGNALED(status)
                if self._status is None and os.WIFEXITED(status) and self.command_pid is not None:
                    self._status = status
        elif answer[0] == "exited":
            self._status = PROGRESS.wait_status = answer[1]
        elif answer[0] == "stopped" and answer[2] == self._resume_count:
            # A report from before the last continuation is out of date.
            self._stopped_by = answer[1]
        return answer

    def _readable(self, timeout_s: float) -> bool:
        # select() accepts no descriptor above 1023.
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _reap_adopted(self) -> bool:
        """Reap the orphans that this process adopted; return whether some may be left."""
        left = set(tree.descendants(os.getpid())) - {self.exempt_pid}
        self._adopted.update(left)
        for pid in list(self._adopted):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if left:
            self._empty_looks = 0
        else:
            self._empty_looks += 1
        return self._empty_looks < tree.LOOKS


def _lost(number: int) -> ReaperLostError:
    """Return the error for a limit that keeps the reaper from starting the command."""
    hint = _LIMITS.get(number)
    return ReaperLostError(os.strerror(number) + (f" (see {hint})" if hint else ""))
