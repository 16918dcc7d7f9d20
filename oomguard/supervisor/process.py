"""Run the command once: start and watch it, then stop every process that it left."""

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
from oomguard.supervisor.reaper import Child
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import DRAIN_S, StandardInput, Tee
from oomguard.supervisor.terminal import TerminalJob, shown_on_terminal
from oomguard.supervisor.tree import KILL_WAIT_S, read_file

OUTER: Final = "OOMGUARD_OUTER_RUN"
# Processes that the command leaves behind may finish as long as their output is waited for.
SPARE_S: Final = DRAIN_S
# Interval of all work besides the copying.
LOOK_S: Final = 0.1
# A killed tree is gone by then, or the reaper hangs.
_AFTER_KILL_S: Final = 3.0
# Python sets it if the locale is C (PEP 538), and so also for every child.
_COERCED: Final = b"LC_CTYPE="


class Command(NamedTuple):
    """Hold the words of a command and its environment; None removes a variable."""

    argv: tuple[str, ...]
    env: Mapping[str, str | None]


class Exit(NamedTuple):
    """Describe how a run of the command ended.

    Attributes:
        status: as a shell reports it (128 + n for a signal).
        seconds: how long it ran.
        is_cut: whether some output is lost because a disk was full.
        of_reader: whether it ended because our reader was gone (``| head``), which is not a
            failure.
    """

    status: int
    seconds: float
    is_cut: bool = False
    of_reader: bool = False


class NotStartedError(Exception):
    """Report a command that could not start; ``status`` is what a shell would return."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class PumpHook(Protocol):
    """Do further work during the copying."""

    def attach(self, tee: Tee) -> None:
        """Register further descriptors."""

    def tick(self) -> None:
        """Do the work that is due."""


class NoPumpHook:
    """Do no further work."""

    def attach(self, tee: Tee) -> None:
        """Register nothing."""

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
    hook: PumpHook | None = None,
    messages: Messages | None = None,
) -> Exit:
    """Run the command to its end, and then stop every process that it left.

    Args:
        command: the command.
        buffer: records the output, which is also passed on unchanged.
        signals: forwarded to the command while it runs; after a stop nothing is started.
        source: gives the command its standard input from the beginning.
        grace_s: seconds between a stop signal and a kill; 0 kills at once without the signal.
        on_started: called after the start of the command.
        on_failing: called after a failure, before its remaining processes are stopped.
        pty: whether the command gets its own terminal if our output is one.
        hook: further work during the copying; None (default) for none.
        messages: reports lost output; None (default) for standard error.

    Raises:
        NotStartedError: if the command cannot be started.
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
        command, buffer, signals, source, terminal, grace_s, hook or NoPumpHook(), messages
    )
    try:
        status = attempt.run(on_started, on_failing)
    except NotStartedError:
        if terminal is not None:
            terminal.close()
        raise
    # Not in a finally block: after any other error the command continues, on this terminal.
    if terminal is not None:
        terminal.close()
    tee = attempt.tee
    of_reader = tee.lost_reader and status == 128 + signal.SIGPIPE
    return Exit(status, time.monotonic() - started, bool(tee.lost_bytes), of_reader)


class _Attempt:
    """Run one attempt, from its start to the end of its process tree."""

    def __init__(
        self,
        command: Command,
        buffer: OutputBuffer,
        signals: SignalForwarder,
        source: StandardInput,
        terminal: TerminalJob | None,
        grace_s: float,
        hook: PumpHook,
        messages: Messages,
    ) -> None:
        self._command = command
        self._buffer = buffer
        self._signals = signals
        self._source = source
        self._terminal = terminal
        self._grace_s = grace_s
        self._hook = hook
        self._messages = messages
        self.tee = Tee(buffer)
        self._looked_s = 0.0
        self._killed_s: float | None = None
        self._ended_s: float | None = None

    def run(self, on_started: Callable[[], None], on_failing: Callable[[], None]) -> int:
        """Run the command; return its exit status as a shell reports it."""
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
        self._hook.attach(self.tee)
        # If the copying fails, failsafe.py continues it.
        self._copy(process)
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
            lambda: signals.is_urgent or (signals.stopped_by is not None and has_ended()),
        )
        if self._terminal is not None:
            # A raw terminal would show oomguard's own lines as a staircase.
            self._terminal.give_back()
        for number, count in self.tee.lost_bytes.items():
            if number == 1:
                name = "standard output"
            else:
                name = "standard error"
            self._messages.say(
                "error", "Output was lost, because its disk is full", stream=name, bytes=count
            )
        # A command may close its output and continue.
        while process.wait(0.05) is None:
            self._tick()

    def _tick(self) -> None:
        """Do the work that is due between the copying."""
        beat()
        if self._terminal is not None:
            self._terminal.tick()
        stopped_s = self._signals.stopped_at_s
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._source.look()
            self._hook.tick()
            self._signals.reaper.check_health()
        # A reaper whose tree outlives KILL hangs, so this process takes over from it.
        if self._killed_s is not None:
            if now_s - self._killed_s > _AFTER_KILL_S:
                self._signals.reaper.replace()
        elif stopped_s is not None and now_s - stopped_s > self._grace_s:
            self._killed_s = now_s
            self._signals.reaper.kill()

    def _finish(self, process: Child, on_failing: Callable[[], None]) -> int | None:
        """Stop the remaining processes; return the command's exit code."""
        signals = self._signals
        self._source.look()
        if self._terminal is not None:
            self._terminal.give_back()
        # From here on a stop reaches no command, and the reaper ends what is left.
        signals.detach()
        if process.poll():
            on_failing()
        if signals.stopped_by is None:
            wait_s = KILL_WAIT_S
        else:
            wait_s = min(KILL_WAIT_S, self._grace_s)
        # The time during which we already waited for an orphan's output counts.
        spare_s = SPARE_S - (0.0 if self._ended_s is None else time.monotonic() - self._ended_s)
        is_late = self._killed_s is not None
        reached = signals.reaper.end(
            0.0 if is_late else wait_s, spare_s=spare_s if signals.stopped_by is None else 0.0
        )
        signals.note_delivery(reached=reached)
        return process.wait(KILL_WAIT_S)

    def _start(self) -> Child:
        name = self._command.argv[0]
        if self._terminal is not None:
            place = self._terminal.begin()
        else:
            place = None
        shares_group = place is None or not place.controls
        wanted = {**inherited(), OUTER: str(os.getpid()), **self._command.env}
        env = {}
        for variable, value in wanted.items():
            if value is not None:
                env[variable] = value
        given = self._standard_input()
        try:
            start = self._signals.reaper.start
            return start(
                self._command.argv, env, shares_group=shares_group, stdin=given, terminal=place
            )
        except FileNotFoundError:
            is_file = "/" in name and os.path.isfile(name)
            if is_file:
                why = "its interpreter does not exist"
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
                why = "is not a program for this machine"
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
    """Convert an exit code to a shell's exit status.

    -n stands for signal n, and None for a command that was killed with its reaper.
    """
    if code is None:
        return 128 + signal.SIGKILL
    if code < 0:
        return 128 - code
    return code


def inherited() -> dict[str, str]:
    """Return the variables as oomguard found them, before Python's changes.

    Without /proc, these are Python's variables.
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
    """Return the command's job on our terminal; None if no output is one, or none is left."""
    shown = shown_on_terminal()
    if shown is None:
        return None
    try:
        return TerminalJob(shown, signals.reaper, signals.typed, signals.be_patient)
    except OSError as error:
        reason = error.strerror or str(error)
        messages.say(
            "warning", "The command's output is not a terminal, because none is free", reason=reason
        )
        return None


def _quoted(name: str) -> str:
    """Quote a word for a shell."""
    is_plain = (
        bool(name)
        and all(char.isalnum() or char in "@%+=:,./_-" for char in name)
        and name.isascii()
    )
    if is_plain:
        return name
    return "'" + name.replace("'", "'\"'\"'") + "'"
