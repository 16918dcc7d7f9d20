"""What is typed goes to who reads it: a line that the command does not read is its shell's, and is shown once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest

from support.driving import shell, sitting_at
from support.supervising import QUIET, RUN

PY = sys.executable
# Ends when it is told to, and has read nothing.
WAITS = [PY, "-c", "import signal; print('READY', flush=True); signal.pause()"]
# As a shell script has it: the command, then who reads what it left.
READS = (
    "import os, sys\nprint('NEXT', flush=True)\nprint('READ', repr(sys.stdin.read()), flush=True)"
)


def then(*words: list[str]) -> list[str]:
    """Return a shell that runs one command after the other."""
    return ["sh", "-c", "; ".join(shlex.join(one) for one in words)]


@pytest.mark.parametrize(
    ("typed", "more", "read"),
    [
        (b"one\rtwo\rpart", b"ial\r\x04", "one\ntwo\npartial\n"),
    ],
)
def test_unread_input_goes_to_the_next_reader_once(typed, more, read):
    with sitting_at(then([*QUIET, *WAITS], [PY, "-c", READS])) as terminal:
        terminal.until(b"READY\r\n")
        before = len(terminal.shown)
        terminal.type(typed)
        if (
            echo := typed.rstrip(b"\x04")
            .replace(b"\r", b"\r\n")
            .replace(b"\x16\x03", b"^\b^C")
            .replace(b"b\x7f", b"b\x08 \x08")
        ):
            terminal.until(re.escape(echo))
        pid = psutil.Process(terminal.leader).children(recursive=True)[-1].pid
        terminal.settle()
        os.kill(pid, signal.SIGTERM)
        terminal.until(b"NEXT\r\n")
        terminal.type(more)
        terminal.until(re.escape(f"READ {read!r}".encode()))
        shown = terminal.shown[before:].partition(b"NEXT")[0]
        assert shown.replace(b"^D\x08\x08", b"").replace(b"Terminated\r\n", b"") == echo


def test_line_typed_during_the_command_is_the_shells_next():
    with shell() as terminal:
        terminal.type(shlex.join([*QUIET, *WAITS]).encode() + b"\r")
        terminal.until(b"READY\r\n")
        terminal.type(b"echo $((6 * 7))-; ech")
        terminal.settle()
        psutil.Process(terminal.leader).children(recursive=True)[-1].terminate()
        terminal.until(b"PROMPT> ")
        terminal.type(b"o 4$((1 + 2))\r")
        terminal.until(rb"42-\r\n43\r\n")


def test_what_one_attempt_has_not_read_is_for_the_next_one(tmp_path):
    code = (
        "import os, pathlib, signal, sys\n"
        f"again = pathlib.Path({str(tmp_path / 'again')!r})\n"
        "if again.exists(): print('READ', sys.stdin.readline(), flush=True); sys.exit()\n"
        "again.touch()\nprint('READY', flush=True)\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nsignal.pause()\n"
        f"os.execv(sys.executable, [sys.executable, {str(Path(__file__).with_name('fake_engine.py'))!r}])"
    )
    command = [*RUN, "--allow", "reduces-capacity", "--idempotent", "--", PY, "-c", code]
    with sitting_at(then(command, [PY, "-c", READS])) as terminal:
        terminal.until(b"READY\r\n")
        terminal.type(b"first\rsecond\r")
        terminal.until(b"second\r\n")
        terminal.settle()
        os.kill(psutil.Process(terminal.leader).children(recursive=True)[-1].pid, signal.SIGUSR1)
        terminal.until(b"READ first\r\n")
        terminal.until(b"NEXT\r\n")
        terminal.type(b"\x04")
        terminal.until(rb"READ 'second\\n'")
