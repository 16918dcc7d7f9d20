"""One run of the command: started, watched, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.engines.command import Launch
from oomguard.errors import LaunchError
from oomguard.log import get_logger
from oomguard.supervise import nesting
from oomguard.supervise.environment import inherited
from oomguard.supervise.own_terminal import shown_on_terminal
from oomguard.supervise.process_control import become_subreaper
from oomguard.supervise.recording import Recording
from oomguard.supervise.signals import Signals
from oomguard.supervise.standard_input import StandardInput
from oomguard.supervise.tee import DRAIN_S, Tee
from oomguard.supervise.terminal_job import TerminalJob
from oomguard.supervise.tree import KILL_WAIT_S
from oomguard.supervise.watcher import Child

__all__ = ["DEFAULT_GRACE_S", "Exit", "become_subreaper", "run_once"]

DEFAULT_GRACE_S: Final = 30.0
# What the command leaves running may finish: as long as its output is waited for.
SPARE_S: Final = DRAIN_S


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended.

    Attributes:
        status: as a shell reports it (128 + n for a signal).
        seconds: how long it ran.
        is_cut: whether some of its output is lost, as a full disk did not take it.
        of_reader: whether it ended of a pipe whose reader, ours, had gone (``| head``): no failure of its own.
    """

    status: int
    seconds: float
    is_cut: bool = False
    of_reader: bool = False


def run_once(
    launch: Launch,
    recording: Recording,
    signals: Signals,
    source: StandardInput,
    *,
    grace_s: float = DEFAULT_GRACE_S,
    on_started: Callable[[], None] = lambda: None,
    on_failing: Callable[[], None] = lambda: None,
    pty: bool = True,
) -> Exit:
    """Run the command to its end, then end every process that it left.

    Args:
        launch: the command and what is added to its environment.
        recording: keeps a copy of the output, which goes on unchanged.
        signals: are handed on to the command while it runs; after a stop nothing is started.
        source: gives the command its standard input, from its beginning.
        grace_s: time that the command has after a stop signal; with 0 it is killed and never gets the signal.
        on_started: called when the command has started.
        on_failing: called when the command has failed, before what it left running is ended.
        pty: whether the command has a terminal of its own where our output is one.

    Raises:
        LaunchError: the command cannot be started.
    """
    if signals.stopped_by is not None:
        return Exit(128 + signals.stopped_by, 0.0)
    started = time.monotonic()
    terminal = _terminal(signals) if pty else None
    with contextlib.closing(terminal) if terminal is not None else contextlib.nullcontext():
        status, tee = _run(launch, recording, signals, source, terminal, grace_s, on_started, on_failing)
    of_reader = tee.lost_reader and status == 128 + signal.SIGPIPE
    return Exit(status, time.monotonic() - started, bool(tee.lost_bytes), of_reader)


def _run(
    launch: Launch,
    recording: Recording,
    signals: Signals,
    source: StandardInput,
    terminal: TerminalJob | None,
    grace_s: float,
    on_started: Callable[[], None],
    on_failing: Callable[[], None],
) -> tuple[int, Tee]:
    process = _start(launch, signals, source, terminal)
    signals.attach(grace_s=grace_s, printed=lambda: recording.came, terminal=terminal)
    on_started()
    is_late, ended_s, tee = False, None, Tee(recording)
    try:
        for number, pipe in process.outputs.items():
            if pipe.closed:
                tee.lost_reader = True
            else:
                tee.add(pipe, number)
        if terminal is not None:
            terminal.attach(tee)

        def check_grace() -> None:
            nonlocal is_late
            if terminal is not None:
                terminal.tick()
            stopped_s = signals.stopped_at_s
            if stopped_s is None or time.monotonic() - stopped_s <= grace_s or is_late:
                return
            is_late = True
            signals.watcher.kill()

        def has_ended() -> bool:
            nonlocal ended_s
            if ended_s is None and process.poll() is not None:
                ended_s = time.monotonic()
            return ended_s is not None

        tee.pump(has_ended, check_grace, lambda: signals.hurries or (signals.stopped_by is not None and has_ended()))
        if terminal is not None:
            terminal.give_back()  # before we print anything
        for number, count in tee.lost_bytes.items():
            name = "standard output" if number == 1 else "standard error"
            get_logger().error("output is lost: what it goes to is full", stream=name, bytes=count)
        while process.wait(0.05) is None:  # it closed its output and goes on
            check_grace()
    finally:
        source.end()
        if terminal is not None:
            terminal.give_back()
        if process.poll() is None:  # oomguard failed
            signals.watcher.kill()
        signals.detach()
        if process.poll():
            on_failing()
        wait_s = KILL_WAIT_S if signals.stopped_by is None else min(KILL_WAIT_S, grace_s)
        # What an orphan had already, while we waited for its output, counts.
        spare_s = SPARE_S - (0.0 if ended_s is None else time.monotonic() - ended_s)
        told = signals.watcher.end(0.0 if is_late else wait_s, spare_s=spare_s if signals.stopped_by is None else 0.0)
        signals.was_told(told=told)
        code = process.wait(KILL_WAIT_S)
    return 128 + 9 if code is None else 128 - code if code < 0 else code, tee


def _terminal(signals: Signals) -> TerminalJob | None:
    """Return what makes the command a job on our terminal; None where no output is one, or there is no second one."""
    shown = shown_on_terminal()
    if shown is None:
        return None
    try:
        return TerminalJob(shown, signals.watcher, signals.typed, signals.be_patient, signals.lasting)
    except OSError as error:
        get_logger().warning("the command's output is no terminal", reason=error.strerror or str(error))
        return None


def _start(launch: Launch, signals: Signals, source: StandardInput, terminal: TerminalJob | None) -> Child:
    env = {**inherited(), **nesting.variables(), **launch.env}
    name = launch.argv[0]
    shown = shlex.quote(name)
    place = terminal.begin() if terminal is not None else None
    shares_group = place is None or not place.controls
    given = source.for_child()
    try:
        return signals.watcher.start(launch.argv, env, shares_group=shares_group, stdin=given, terminal=place)
    except FileNotFoundError:
        why = "its interpreter is not there" if "/" in name and Path(name).is_file() else "command not found"
        raise LaunchError(f"{shown}: {why}", exit_status=127) from None
    except PermissionError:
        why = "is a directory" if "/" in name and Path(name).is_dir() else "cannot be executed"
        raise LaunchError(f"{shown}: {why}", exit_status=126) from None
    except OSError as error:
        why = "is no program for this machine" if error.errno == errno.ENOEXEC else error.strerror or str(error)
        raise LaunchError(f"{shown}: {why}", exit_status=126) from None
    except ValueError as error:
        raise LaunchError(f"{name!r}: {error}", exit_status=126) from None
    finally:
        if given is not None:
            os.close(given)
