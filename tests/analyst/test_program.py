"""Becoming the command, and what the watcher hears of it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from oomguard.supervisor.reaper_process import _is_binary, read_failure
from support.each import each


def child(last: bytes | None, *, stops: bool) -> tuple[int, int]:
    """Fork a child that stops itself or not, then tells a failure, or becomes something else."""
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        if last is not None:
            os.write(tells, last)
        os._exit(0)
    os.close(tells)
    return told, pid


@each("last", [b"2", None])
def test_a_failure_is_read_and_the_closed_pipe_is_none(last):
    told, pid = child(last, stops=False)
    assert read_failure(told, pid) == (last or b"")
    os.waitpid(pid, 0)
    os.close(told)


def test_child_stopped_before_exec_blocks_no_one():
    told, pid = child(None, stops=True)
    assert read_failure(told, pid) == b""
    os.kill(pid, signal.SIGCONT)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(told)


def test_ended_child_with_an_inherited_pipe_counts_as_ended():
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    closing = threading.Timer(
        0.2, os.close, [tells]
    )  # beyond the wait after which it is looked whether the child is stopped
    closing.start()
    assert read_failure(told, pid) == b""
    closing.join()
    os.waitpid(pid, 0)
    os.close(told)


@pytest.mark.parametrize(
    ("start", "is_it"),
    [(b"\x7fELFjunk\n", True), (b"MZ\0\0", True), (b"#!/nowhere\n", False), (b"echo 1\n", False)],
)
def test_a_program_of_another_machine_is_no_text_for_the_shell(tmp_path, start, is_it):
    (tmp_path / "program").write_bytes(start)
    assert _is_binary(os.fsencode(tmp_path / "program")) is is_it
