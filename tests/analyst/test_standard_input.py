"""Standard input: it is the command's, a file is read again from its beginning, and what was read of a pipe is gone."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys

import pytest

from oomguard.supervisor.streams import StandardInput
from support.each import each
from support.supervising import LIMIT_S, QUIET, run

ENDED = "the command read its standard input from a pipe, which cannot be read twice"


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


@each("kind", ["pipe", "socket"])
@each(("read_bytes", "lost"), [(0, None), (3, ENDED)])
def test_what_was_read_of_a_pipe_is_gone(kind, read_bytes, lost):
    ends = os.pipe() if kind == "pipe" else tuple(end.detach() for end in socket.socketpair())
    os.write(ends[1], b"one\ntwo\n")
    source = StandardInput(ends[0])
    assert source.for_child() is None
    source.look()
    os.read(ends[0], read_bytes)
    source.look()

    assert source.lost == lost
    for end in ends:
        os.close(end)


def test_data_read_between_two_looks_is_gone_after_its_writer(pipe):
    source = StandardInput(pipe[0])
    os.write(pipe[1], b"one\n")
    os.read(pipe[0], 4)
    source.look()
    assert source.lost is None
    os.close(pipe[1])
    source.look()
    assert source.lost == ENDED


def test_ended_or_silent_pipe_is_the_same_at_each_attempt(pipe):
    idle = StandardInput(pipe[0])
    idle.look()
    os.close(pipe[1])
    ended = StandardInput(pipe[0])
    ended.look()

    assert (idle.lost, ended.lost) == (None, None)


def test_each_attempt_reads_the_input_file_from_its_beginning(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    source = StandardInput(path=str(tmp_path / "prompts.txt"))
    for _ in range(2):
        with os.fdopen(source.for_child()) as stream:
            assert stream.read() == "one\ntwo\n"
    assert source.lost is None


def test_the_command_reads_the_file_of_the_option(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    ran = run("--input", str(tmp_path / "prompts.txt"), command=("cat",))

    assert (ran.stdout, ran.returncode) == ("one\ntwo\n", 0)


def test_a_named_pipe_as_the_option_is_refused_with_its_path(tmp_path):
    os.mkfifo(tmp_path / "prompts")
    ran = run("--input", str(tmp_path / "prompts"), command=("cat",))

    assert ran.returncode == 125
    assert f"--input {tmp_path / 'prompts'}: it is a named pipe" in ran.stderr


def test_a_directory_as_standard_input_ends_python_itself():
    # No code of ours has run by then; supervision.md says so.
    folder = os.open("/", os.O_RDONLY)
    ended = []
    for command in ([*QUIET, "true"], [sys.executable, "-c", "pass"]):
        ended.append(
            subprocess.run(command, stdin=folder, capture_output=True, timeout=LIMIT_S, check=False)
        )
    os.close(folder)
    assert [ran.returncode for ran in ended] == [1, 1]
    for ran in ended:
        assert b"<stdin> is a directory" in ran.stderr


LOOPS = [
    "printf 'a\nb\nc\nd\n' | while read l; do echo $l; {} bash -c 'read x; echo read $x'; done",
    "seq 30000 | {{ {} head -c 2; wc; }}",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_run_in_a_shell_loop_reads_what_the_command_reads(loop, tmp_path):
    def shown(command: list[str]) -> bytes:
        line = loop.format(shlex.join(command))
        ran = subprocess.run(
            ["bash", "-c", line], capture_output=True, timeout=LIMIT_S, check=False, cwd=tmp_path
        )
        assert ran.stderr == b""
        return ran.stdout

    assert shown(QUIET) == shown(["env"])


def test_a_file_is_read_again_from_where_it_stood(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"skipped\none\ntwo\n")
    fd = os.open(path, os.O_RDONLY)
    os.lseek(fd, 8, os.SEEK_SET)
    source = StandardInput(fd)
    for _ in range(2):
        assert source.for_child() is None
        assert os.read(fd, 100) == b"one\ntwo\n"
    os.close(fd)


def test_a_closed_standard_input_stays_closed():
    source = StandardInput(987)
    assert source.for_child() is None
    source.look()
    assert source.lost is None


def test_writable_pipe_belongs_to_the_command_and_is_not_reread(
    tmp_path,
):
    os.mkfifo(tmp_path / "fifo")
    both = os.open(tmp_path / "fifo", os.O_RDWR)
    source = StandardInput(both)
    assert source.for_child() is None
    assert source.lost == "standard input is a pipe that is also open for writing"
    os.close(both)
