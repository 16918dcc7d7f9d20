"""Who stops oomguard by STOP, which nobody can catch, stops the command; who continues it continues the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.driving import sitting_at
from support.each import each
from support.supervising import LIMIT_S, QUIET, wait_for

PY = sys.executable
JOB_SHELL = [PY, str(Path(__file__).parent / "job_shell.py")]
# A parent and its child, each of which tells its number; CONT is told as often as it comes.
WORKS = """
import os, signal, subprocess, sys, time
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
else:
    signal.signal(signal.SIGCONT, lambda *_: print("CONT", flush=True))
print("UP", os.getpid(), flush=True)
ends = time.monotonic() + 60
while time.monotonic() < ends: time.sleep(0.02)
"""


@contextmanager
def running(*command: str, **options: bool | int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command under oomguard; a test that fails leaves nothing that is stopped, and waited for."""
    with subprocess.Popen([*QUIET, *command], stdout=subprocess.PIPE, **options) as process:
        try:
            yield process
        finally:
            process.kill()  # the watcher ends the rest


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def up(line: bytes) -> int:
    name, pid = line.split()
    assert name == b"UP"
    return int(pid)


@each("again", [1, 2])
def test_a_stopped_run_stops_its_command_and_goes_on_with_it(again):
    with running(PY, "-c", WORKS) as process:
        command = up(process.stdout.readline())
        for _ in range(again):
            process.send_signal(signal.SIGSTOP)
            assert wait_for(lambda: is_stopped(command))
            process.send_signal(signal.SIGCONT)
            assert wait_for(lambda: not is_stopped(command))
        process.terminate()
        assert process.stdout.read() == b"CONT\n" * again
    assert process.returncode == 143


def test_a_killed_run_that_was_stopped_leaves_nothing():
    with running(PY, "-c", WORKS) as process:
        command = psutil.Process(up(process.stdout.readline()))
        process.send_signal(signal.SIGSTOP)
        assert wait_for(lambda: is_stopped(command.pid))
        process.kill()
        assert psutil.wait_procs([command], timeout=LIMIT_S)[1] == []


def test_job_on_a_terminal_stops_whole_and_resumes_with_fg():
    with sitting_at([*JOB_SHELL, *QUIET, PY, "-c", WORKS, WORKS]) as terminal:
        job = int(terminal.until(rb"JOB (\d+)").group(1))
        pids = [int(terminal.until(rb"UP (\d+)").group(1)) for _ in range(2)]
        os.kill(job, signal.SIGSTOP)
        terminal.until(b"STOPPED")
        assert wait_for(lambda: all(is_stopped(pid) for pid in pids))
        os.kill(psutil.Process(job).ppid(), signal.SIGUSR1)
        assert wait_for(lambda: not any(is_stopped(pid) for pid in pids))
        os.kill(job, signal.SIGTERM)
        terminal.until(b"STATUS 143")
