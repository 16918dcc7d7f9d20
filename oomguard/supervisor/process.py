"""One run of the command: started, watched, and ended with everything that it started."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol

from oomguard.supervisor.failsafe import PROGRESS, beat
from oomguard.supervisor.messages import Messages
from oomguard.supervisor.options import DEFAULT_GRACE_S
from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.process_control import become_subreaper
from oomguard.supervisor.reaper import Child
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import DRAIN_S, StandardInput, Tee
from oomguard.supervisor.terminal import TerminalJob, shown_on_terminal
from oomguard.supervisor.tree import KILL_WAIT_S, read_file

__all__ = ["DEFAULT_GRACE_S", "Command", "Exit", "NotStartedError", "become_subreaper", "run_once"]

OUTER: Final = "OOMGUARD_OUTER_RUN"
# What the command leaves running may finish: as long as its output is waited for.
SPARE_S: Final = DRAIN_S
# Between the copying it is looked at other things this often.
LOOK_S: Final = 0.1
# A tree that was killed is gone by then, or the reaper does not answer.
_AFTER_KILL_S: Final = 3.0
# Python sets it for itself where the locale is C (PEP 538), and so for every child.
_COERCED: Final = b"LC_CTYPE="


class Command(NamedTuple):
    """What is started: its words, and what is set in its environment; None takes a variable out."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None]


class Exit(NamedTuple):
    """How a run ended.

    Attributes:
        status: as a shell reports it (128 + n for a signal).
        seconds: how long it ran.
        is_cut: whether some of its output is lost, as a full disk did not take it.
        of_reader: whether it ended of a pipe whose reader, ours, had gone (``| head``): no failure
            of its own.
    """

    status: int
    seconds: float
    is_cut: bool = False
    of_reader: bool = False


class NotStartedError(Exception):
    """A command that could not be started; ``status`` is what a shell would return."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Along(Protocol):
    """What goes along with the copying."""

    def attach(self, tee: Tee) -> None:
        """Watch descriptors of one's own."""

    def tick(self) -> None:
        """Do what is due."""


class Nothing:
    """Nothing goes along."""

    def attach(self, tee: Tee) -> None:
        """Watch nothing."""

    def tick(self) -> None:
        """Do nothing."""


def run_once(
    command: Command,
    buffer: OutputBuffer,
    signals: SignalForwarder,
    source: StandardInput,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    on_started: Callable[[], None] = lambda: None,
    on_failing: Callable[[], None] = lambda: None,
    pty: bool = True,
    along: Along | None = None,
    messages: Messages | None = None,
) -> Exit:
    """Run the command to its end, then end every process that it left.

    Args:
        command: what is started.
        buffer: keeps a copy of the output, which goes on unchanged.
        signals: are handed on to the command while it runs; after a stop nothing is started.
        source: gives the command its standard input, from its beginning.
        grace_s: time that the command has after a stop signal; with 0 it is killed and never gets
            the signal.
        on_started: called when the command has started.
        on_failing: called when the command has failed, before what it left running is ended.
        pty: whether the command has a terminal of its own where our output is one.
        along: goes along with the copying; None (default): nothing.
        messages: where lost output is reported; None (default): to standard error.

    Raises:
        NotStartedError: the command cannot be started.
    """
    if signals.stopped_by is not None:
        return Exit(128 + signals.stopped_by, 0.0)
    started = time.monotonic()
    messages = messages or Messages()
    if pty:
        terminal = _terminal(signals, messages)
    else:
        terminal = None
    attempt = _Attempt(
        command, buffer, signals, source, terminal, grace_s, along or Nothing(), messages
    )
    try:
        status = attempt.run(on_started, on_failing)
    except NotStartedError:
        if terminal is not None:
            terminal.close()
        raise
    if terminal is not None:  # where anything else failed the command goes on, on its terminal
        terminal.close()
    tee = attempt.tee
    of_reader = tee.lost_reader and status == 128 + signal.SIGPIPE
    return Exit(status, time.monotonic() - started, bool(tee.lost_bytes), of_reader)


class _Attempt:
    """One attempt, from its start to the end of its tree."""

    def __init__(
        self,
        command: Command,
        buffer: OutputBuffer,
        signals: SignalForwarder,
        source: StandardInput,
        terminal: TerminalJob | None,
        grace_s: float,
        along: Along,
        messages: Messages,
    ) -> None:
        self._command = command
        self._buffer = buffer
        self._signals = signals
        self._source = source
        self._terminal = terminal
        self._grace_s = grace_s
        self._along = along
        self._messages = messages
        self.tee = Tee(buffer)
        self._looked_s = 0.0
        self._killed_s: float | None = None
        self._ended_s: float | None = None

    def run(self, on_started: Callable[[], None], on_failing: Callable[[], None]) -> int:
        """Run the command; return its exit status as a shell has it."""
        signals = self._signals
        terminal = self._terminal
        process = self._start()
        signals.attach(grace_s=self._grace_s, printed=lambda: self._buffer.came, terminal=terminal)
        on_started()
        for number, pipe in process.outputs.items():
            if pipe.closed:
                self.tee.lost_reader = True
            else:
                self.tee.add(pipe, number)
        if terminal is not None:
            terminal.attach(self.tee)
        self._along.attach(self.tee)
        self._copy(process)  # where this fails, failsafe.py goes on with the copying
        code = self._finish(process, on_failing)
        PROGRESS.status = status_of(code)
        return PROGRESS.status

    def _copy(self, process: Child) -> None:
        """Copy the output until the command and its pipes have ended."""

        def has_ended() -> bool:
            if self._ended_s is None and (code := process.poll()) is not None:
                self._ended_s = time.monotonic()
                PROGRESS.status = status_of(code)
            return self._ended_s is not None

        signals = self._signals
        self.tee.pump(
            has_ended,
            self._tick,
            lambda: signals.hurries or (signals.stopped_by is not None and has_ended()),
        )
        if self._terminal is not None:
            self._terminal.give_back()  # before we print anything
        for number, count in self.tee.lost_bytes.items():
            if number == 1:
                name = "standard output"
            else:
                name = "standard error"
            self._messages.say(
                "error", "output is lost: what it goes to is full", stream=name, bytes=count
            )
        while process.wait(0.05) is None:  # it closed its output and goes on
            self._tick()

    def _tick(self) -> None:
        """Do what is due between the copying."""
        beat()
        if self._terminal is not None:
            self._terminal.tick()
        stopped_s = self._signals.stopped_at_s
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._source.look()
            self._along.tick()
            self._signals.watcher.look_after()
        if self._killed_s is not None:
            if now_s - self._killed_s > _AFTER_KILL_S:
                self._signals.watcher.replace()
        elif stopped_s is not None and now_s - stopped_s > self._grace_s:
            self._killed_s = now_s
            self._signals.watcher.kill()

    def _finish(self, process: Child, on_failing: Callable[[], None]) -> int | None:
        """End what the command left; return its exit code."""
        signals = self._signals
        self._source.look()
        if self._terminal is not None:
            self._terminal.give_back()
        signals.detach()
        if process.poll():
            on_failing()
        if signals.stopped_by is None:
            wait_s = KILL_WAIT_S
        else:
            wait_s = min(KILL_WAIT_S, self._grace_s)
        # What an orphan had already, while we waited for its output, counts.
        spare_s = SPARE_S - (0.0 if self._ended_s is None else time.monotonic() - self._ended_s)
        is_late = self._killed_s is not None
        told = signals.watcher.end(
            0.0 if is_late else wait_s, spare_s=spare_s if signals.stopped_by is None else 0.0
        )
        signals.was_told(told=told)
        return process.wait(KILL_WAIT_S)

    def _start(self) -> Child:
        name = self._command.argv[0]
        if self._terminal is not None:
            place = self._terminal.begin()
        else:
            place = None
        shares_group = place is None or not place.controls
        wanted = {**inherited(), OUTER: str(os.getpid()), **self._command.env}
        env = {name: value for name, value in wanted.items() if value is not None}
        given = self._standard_input()
        try:
            start = self._signals.watcher.start
            return start(
                self._command.argv, env, shares_group=shares_group, stdin=given, terminal=place
            )
        except FileNotFoundError:
            is_file = "/" in name and os.path.isfile(name)
            if is_file:
                why = "its interpreter is not there"
            else:
                why = "command not found"
            raise NotStartedError(f"{_quoted(name)}: {why}", 127) from None
        except PermissionError:
            is_folder = "/" in name and os.path.isdir(name)
            if is_folder:
                why = "is a directory"
            else:
                why = "cannot be executed"
            raise NotStartedError(f"{_quoted(name)}: {why}", 126) from None
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                why = "is no program for this machine"
            else:
                why = error.strerror or str(error)
            raise NotStartedError(f"{_quoted(name)}: {why}", 126) from None
        except ValueError as error:
            raise NotStartedError(f"{name!r}: {error}", 126) from None
        finally:
            if given is not None:
                os.close(given)

    def _standard_input(self) -> int | None:
        try:
            return self._source.for_child()
        except OSError as error:
            raise NotStartedError(f"--input {error.filename}: {error.strerror}", 125) from None


def status_of(code: int | None) -> int:
    """Return an exit code (-n for signal n, None for a command that was killed with its reaper) as
    a shell has it.
    """
    if code is None:
        return 128 + signal.SIGKILL
    if code < 0:
        return 128 - code
    return code


def inherited() -> dict[str, str]:
    """Return the variables as oomguard found them, not as Python made them; without /proc, as
    Python has them.
    """
    variables = dict(os.environ)
    try:
        given = read_file("/proc/self/environ")
    except OSError:
        return variables
    if not any(entry.startswith(_COERCED) for entry in given.split(b"\0")):
        variables.pop("LC_CTYPE", None)
    return variables


def _terminal(signals: SignalForwarder, messages: Messages) -> TerminalJob | None:
    """Return what makes the command a job on our terminal; None where no output is one, or there is
    no second one.
    """
    shown = shown_on_terminal()
    if shown is None:
        return None
    try:
        return TerminalJob(
            shown, signals.watcher, signals.typed, signals.be_patient, signals.lasting
        )
    except OSError as error:
        reason = error.strerror or str(error)
        messages.say("warning", "the command's output is no terminal", reason=reason)
        return None


def _quoted(name: str) -> str:
    """Return a word as a shell takes it."""
    is_plain = (
        bool(name)
        and all(char.isalnum() or char in "@%+=:,./_-" for char in name)
        and name.isascii()
    )
    if is_plain:
        return name
    return "'" + name.replace("'", "'\"'\"'") + "'"
