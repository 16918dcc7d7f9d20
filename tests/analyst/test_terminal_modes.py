"""What a command sets on its terminal does not reach the user's terminal or the next attempt."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from support.driving import sitting_at
from support.supervising import QUIET, RUN

PY = sys.executable
JOB_SHELL = [PY, str(Path(__file__).with_name("job_shell.py"))]
ENGINE = [PY, str(Path(__file__).with_name("fake_engine.py"))]
SHOWS = "stty -a | tr '\\n' ' ' | sed s/^/MODES/; echo"
KILL_STATUS = 128 + signal.SIGKILL


def test_what_a_command_sets_ends_with_it():
    command = [*QUIET, "stty", "-echo", "intr", "^X", "rows", "40", "-onlcr"]
    with sitting_at(["sh", "-c", f"{SHOWS}; {shlex.join(command)}; {SHOWS}"]) as terminal:
        before = terminal.until(rb"MODES(.*?)\r?\n").group(1)
        assert terminal.until(rb"MODES(.*?)\r?\n").group(1) == before


def test_command_killed_by_a_signal_leaves_the_terminal_intact():
    command = ["sh", "-c", "stty raw -echo rows 40; kill -9 $$"]
    with sitting_at([*JOB_SHELL, *QUIET, *command]) as terminal:
        before = terminal.modes
        terminal.until(f"STATUS {KILL_STATUS}".encode())
        assert terminal.modes == before


def test_failed_attempts_settings_do_not_reach_the_next():
    script = f'stty -echo -onlcr; exec {shlex.join(ENGINE)} "$@"'
    command = [
        *RUN,
        "--allow",
        "reduces-capacity",
        "--",
        "sh",
        "-c",
        f"stty -a | grep -o '.echo '; {script}",
        "sh",
    ]
    with sitting_at(["sh", "-c", f"{shlex.join(command)}; {SHOWS}"]) as terminal:
        shown = terminal.end()
    assert shown.count(b" echo \r\n") == 2
    assert b"What oomguard did" in shown
    told = shown[shown.index(b"What oomguard did") : shown.index(b"MODES")]
    assert told.count(b"\n") == told.count(b"\r\n")
    assert b" onlcr" in shown[shown.index(b"MODES") :]
