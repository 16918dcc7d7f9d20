"""Under a real bash: jobs stop and go on, the shell has its terminal back, and a job behind it leaves the terminal alone."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.driving import Terminal, shell
from support.each import each
from support.supervising import QUIET, state, wait_for

PY = sys.executable
RUNS_HEX = Path(__file__).with_name("runs_hex.py")
# Answers each line that is typed, and tells a new size of its window.
ANSWERS = """
import os, signal, sys
signal.signal(signal.SIGWINCH, lambda *_: os.write(1, b"SIZE %d %d\\n" % tuple(os.get_terminal_size())))
signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"GOES ON\\n"))
print("READY", os.getpid(), flush=True)
while line := sys.stdin.readline(): print("GOT", line.strip(), flush=True)
print("END OF INPUT")
"""


@contextmanager
def bash() -> Iterator[Terminal]:
    """A shell in which ``run`` is oomguard, and ``answers`` a command."""
    with shell() as terminal:
        command(terminal, f"alias run='{shlex.join(QUIET)}'")
        command(terminal, f"""PY="{PY} {RUNS_HEX}"; stty sane""")
        yield terminal


def command(terminal: Terminal, line: str) -> None:
    """Type a line, and wait for the next prompt."""
    terminal.type(line.encode() + b"\r")
    terminal.until(b"PROMPT> $")


def begin(terminal: Terminal, line: str) -> None:
    terminal.type(line.encode() + b"\r")
    terminal.until(b"\n")


def py(code: str) -> str:
    """Return a command that runs the code; its line, which the terminal shows too, does not hold what it prints."""
    return f"$PY {code.encode().hex()}"


def modes(terminal: Terminal) -> bytes:
    """The modes that a command has which the shell starts, at its prompt."""
    terminal.type(b"stty -g | sed s/^/MODES/\r")
    found = terminal.until(rb"MODES([0-9a-f:]+)\r\n").group(1)
    terminal.until(b"PROMPT> ")
    return found


def is_told_stopped(terminal: Terminal, by: bytes) -> None:
    """Ask the shell until it tells so: it learns of a stop when the last thread has, a moment after the first."""
    for _ in range(50):
        terminal.type(b"jobs -l\r")
        if b"Stopped (" + by + b")" in terminal.until(rb"(?s)jobs -l.*?PROMPT> ").group():
            return
        time.sleep(0.1)
    raise AssertionError(f"the shell never told that it was stopped by {by!r}")


def oomguards(terminal: Terminal) -> psutil.Process:
    """The oomguard that the shell started."""
    (found,) = psutil.Process(terminal.leader).children()
    return found


def test_ctrl_z_gives_the_shell_its_terminal_and_fg_the_command():
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)}")
        child = int(terminal.until(rb"READY (\d+)").group(1))
        for text in (b"one", b"two", b"three"):
            terminal.becomes_raw()
            terminal.type(text + b"\r")
            terminal.until(b"GOT " + text)
            terminal.type(b"\x1a")
            terminal.until(rb"\[1\]\+  Stopped  ")
            assert state(child) == "T"
            assert modes(terminal) == before
            begin(terminal, "fg")
            terminal.until(b"GOES ON")
        terminal.becomes_raw()
        terminal.type(b"\x04")
        terminal.until(rb"END OF INPUT\r\n.*PROMPT> ")
        assert modes(terminal) == before
        assert terminal.shown.count(b"GOES ON\r\n") == 3


def test_command_that_stops_itself_returns_the_terminal():
    """As nano does, by STOP to its group; no key of a raw terminal could continue it."""
    code = (
        "import os, signal, sys\nos.kill(0, signal.SIGSTOP)\nprint('AGAIN', flush=True)\n"
        "print('GOES ON', sys.stdin.readline().strip(), flush=True)"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(code)}")
        terminal.until(b"Stopped")
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before
        begin(terminal, "fg")
        terminal.until(b"AGAIN")
        terminal.type(b"x\r")
        terminal.until(b"GOES ON x")


def test_a_job_that_starts_behind_the_shell_stops_when_it_reads():
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)} &")
        terminal.until(b"READY")
        assert wait_for(lambda: state(oomguards(terminal).pid) == "T")
        assert modes(terminal) == before
        is_told_stopped(terminal, b"tty input")
        begin(terminal, "fg")
        terminal.until(b"GOES ON")
        terminal.type(b"me\r")
        terminal.until(b"GOT me")
        terminal.type(b"\x04")
        terminal.until(rb"END OF INPUT\r\n.*PROMPT> ")
        assert modes(terminal) == before


def test_what_is_piped_in_and_what_is_typed_are_two():
    code = (
        "import getpass, sys\nprint('piped', sys.stdin.read().strip(), flush=True)\n"
        "print('typed', len(getpass.getpass('secret: ')), flush=True)\nprint('one\\ntwo')"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"echo in | run {py(code)}")
        terminal.until(b"piped in\r\nsecret: $")
        terminal.type(b"abc\r")
        terminal.until(rb"\r\ntyped 3\r\none\r\ntwo\r\n.*PROMPT> ")
        assert b"abc" not in terminal.shown
        assert modes(terminal) == before


@each("where", ["{} | cat", "{}"])
def test_ctrl_c_ends_the_command_once_in_a_pipeline_too(where):
    code = (
        "import os, time\n"
        "try: print('READY', flush=True); os.write(2, b'READY'); time.sleep(3600)\n"
        "except KeyboardInterrupt: os.write(2, b'INTERRUPTED'); time.sleep(0.3)"
    )
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, where.format(f"run {py(code)}"))
        terminal.until(b"READY")
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert terminal.shown.count(b"INTERRUPTED") == 1
        assert modes(terminal) == before


@each("number", [signal.SIGKILL, signal.SIGTERM])
def test_terminal_and_tree_are_clean_however_the_run_ends(number):
    with bash() as terminal:
        before = modes(terminal)
        begin(terminal, f"run {py(ANSWERS)}")
        terminal.until(b"READY")
        terminal.becomes_raw()
        tree = [oomguards(terminal), *oomguards(terminal).children(recursive=True)]
        assert len(tree) == 3
        tree[0].send_signal(number)
        terminal.until(b"PROMPT> ")
        assert modes(terminal) == before
        assert psutil.wait_procs(tree[1:], timeout=60)[1] == []


def test_ctrl_c_ends_a_loop_around_it():
    with bash() as terminal:
        begin(terminal, f"for n in 1 2 3; do run {py(ANSWERS)}; done")
        terminal.until(b"READY")
        terminal.type(b"\x03")
        terminal.until(b"PROMPT> ")
        assert terminal.shown.count(b"READY") == 1
