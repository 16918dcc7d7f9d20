"""On a terminal the command is one job with oomguard: what the terminal or a shell sends reaches it once, and jobs stop and go on."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from support.supervising import LIMIT_S, QUIET, state

HERE = Path(__file__).parent
LISTENER = [sys.executable, str(HERE / "listener.py")]
SHELL = [sys.executable, str(HERE / "job_shell.py")]


class Terminal:
    """A terminal with a shell of one job, and what it shows."""

    def __init__(self, master: int, shell: int) -> None:
        self.master, self.shell, self.shown = master, shell, ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read until it is shown; what came before it is dropped."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"{pattern} is not in {self.shown!r}"
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode()
                except OSError:
                    raise AssertionError(f"ended before {pattern}: {self.shown!r}") from None
        self.shown = self.shown[found.end() :]
        return found

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def heard(self, job: int) -> list[int]:
        """What the listener got until now; it ends."""
        os.kill(job, signal.SIGRTMAX)
        text = self.shown
        deadline = time.monotonic() + LIMIT_S
        while "END" not in text and time.monotonic() < deadline:
            text += os.read(self.master, 4096).decode()
        self.shown = text[text.index("END") :]
        return [int(number) for number in re.findall(r"GOT (\d+)", text)]


@contextmanager
def terminal(*command: str) -> Iterator[tuple[Terminal, int]]:
    """A terminal, and the number of the job that runs in it."""
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # who kills oomguard and its watcher leaves the run's own
        shell, master = pty.fork()
        if shell == 0:
            os.environ["TMPDIR"] = folder
            os.execv(sys.executable, [*SHELL, *command])
        shown = Terminal(master, shell)
        try:
            job = int(shown.until(r"JOB (\d+)").group(1))
            yield shown, job
        finally:
            for process in psutil.Process(shell).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            os.kill(shell, signal.SIGKILL)
            os.waitpid(shell, 0)
            os.close(master)


@contextmanager
def listening(*words: str) -> Iterator[tuple[Terminal, int, int]]:
    with terminal(*QUIET, *LISTENER, *words) as (shown, job):
        yield shown, job, int(shown.until(r"READY (\d+)").group(1))


@pytest.mark.parametrize(("key", "number"), [(b"\x03", signal.SIGINT), (b"\x1c", signal.SIGQUIT)])
def test_a_key_of_the_terminal_arrives_once(key, number):
    with listening() as (shown, job, _):
        shown.type(key)
        assert shown.until(r"GOT (\d+)").group(1) == str(int(number))
        assert shown.heard(job) == []
        shown.until("STATUS 7")


def test_a_signal_to_oomguard_alone_reaches_the_command_once():
    number = signal.SIGUSR1
    with listening() as (shown, job, _):
        began = time.monotonic()
        os.kill(job, number)
        assert shown.until(r"GOT (\d+)").group(1) == str(int(number))
        assert time.monotonic() - began < 4  # not by a second one, sent later
        assert shown.heard(job) == []


def test_a_signal_to_the_whole_job_reaches_the_command_once():
    """What a shell's ``kill %1`` sends."""
    number = signal.SIGTERM
    with listening() as (shown, job, _):
        os.killpg(job, number)
        assert shown.until(r"GOT (\d+)").group(1) == str(int(number))
        assert shown.heard(job) == []


def test_a_change_of_the_terminals_size_arrives_once():
    with listening() as (shown, job, _):
        fcntl.ioctl(shown.master, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
        assert shown.until(r"GOT (\d+)").group(1) == str(int(signal.SIGWINCH))
        assert shown.heard(job) == []


def test_vanished_terminal_hangs_up_the_command_completely():
    shell, master = pty.fork()
    if shell == 0:
        os.execv(
            sys.executable,
            [
                *SHELL,
                *QUIET,
                sys.executable,
                "-c",
                "import time; print('up', flush=True); time.sleep(3600)",
            ],
        )
    shown = Terminal(master, shell)
    shown.until("up")
    tree = psutil.Process(shell).children(recursive=True)
    os.close(master)
    os.waitpid(shell, 0)
    assert psutil.wait_procs(tree, timeout=LIMIT_S)[1] == []


def test_ctrl_z_stops_the_job_and_fg_continues_it():
    with listening("--stoppable") as (shown, job, child):
        for _ in range(3):
            shown.type(b"\x1a")
            shown.until("STOPPED")
            assert state(child) == state(job) == "T"
            os.kill(shown.shell, signal.SIGUSR1)
            shown.until(r"GOT 18\b")
        assert shown.heard(job) == []
        shown.until("STATUS 7")


def test_stopping_oomguard_stops_the_command_and_the_shells_job():
    number = signal.SIGTSTP
    with listening("--stoppable") as (shown, job, child):
        os.kill(job, number)
        shown.until("STOPPED")
        assert state(child) == "T"
        os.kill(shown.shell, signal.SIGUSR1)
        shown.until(r"GOT 18\b")
        assert shown.heard(job) == []


def test_command_reads_the_terminal_despite_redirected_input():
    code = "import os; fd = os.open('/dev/tty', os.O_RDWR); os.write(fd, b'name? '); print('got', os.read(fd, 99).decode().strip())"
    with terminal(
        "/bin/sh", "-c", 'exec "$@" </dev/null', "sh", *QUIET, sys.executable, "-c", code
    ) as (shown, _):
        shown.until(r"name\? ")
        shown.type(b"me\n")
        shown.until("got me")
        shown.until("STATUS 0")


def test_ctrl_c_reaches_a_command_behind_a_script_once():
    """Behind ``&`` a script starts it with INT ignored, and the terminal sends INT to it all the same."""
    script = 'trap : INT; "$@" & wait; wait'
    with terminal("/bin/bash", "-c", script, "bash", *QUIET, *LISTENER) as (shown, _):
        child = int(shown.until(r"READY (\d+)").group(1))
        shown.type(b"\x03")
        shown.until(r"GOT 2\b")
        assert shown.heard(child) == []
