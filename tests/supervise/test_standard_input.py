"""Standard input: a command that is run again reads all of it, and what it does not read stays for the next reader."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from oomguard.supervise import kept_input as module
from oomguard.supervise.pipes import waiting_bytes
from oomguard.supervise.standard_input import StandardInput
from support.each import each
from support.supervising import LIMIT_S, QUIET, wait_for


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


def test_each_attempt_reads_all_of_a_pipe(pipe):
    reader, writer = pipe
    data = os.urandom(3 << 20)
    threading.Thread(
        target=lambda: (os.write(writer, data[: 1 << 16]), _write(writer, data[1 << 16 :]), os.close(writer))
    ).start()

    with StandardInput(reader) as source:
        first = source.for_child()
        assert read_all(first) == data
        source.end()
        assert read_all(source.for_child()) == data
        assert source.lost is None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def test_what_the_first_attempt_left_unread_comes_behind_what_it_read(pipe):
    reader, writer = pipe
    os.write(writer, b"one\n")

    with StandardInput(reader) as source:
        first = source.for_child()
        assert os.read(first, 100) == b"one\n"
        os.close(first)
        source.end()
        os.write(writer, b"two\n")
        os.close(writer)
        assert read_all(source.for_child()) == b"one\ntwo\n"


def test_a_command_that_ends_without_reading_does_not_hold_us_up(pipe):
    reader, writer = pipe
    _fill = os.write(writer, b"x" * 65536)

    with StandardInput(reader) as source:
        os.close(source.for_child())
        source.end()
        second = source.for_child()
        os.close(writer)
        assert read_all(second) == b"x" * _fill


def test_more_than_is_kept_is_passed_on_and_told(pipe, monkeypatch):
    monkeypatch.setattr(module, "CAP_BYTES", 1000)
    reader, writer = pipe
    os.write(writer, b"x" * 5000)
    os.close(writer)

    with StandardInput(reader) as source:
        assert read_all(source.for_child()) == b"x" * 5000
        source.end()
        assert source.lost == "more than 0 MiB of standard input have been read"


@each("read_bytes", [0, 5000])
@each("kind", ["pipe", "socket"])
def test_what_no_attempt_has_read_stays_for_the_next_reader(kind, read_bytes):
    data = os.urandom(150_000)
    ends = os.pipe() if kind == "pipe" else tuple(end.detach() for end in socket.socketpair())
    writing = threading.Thread(target=lambda: (_write(ends[1], data), os.close(ends[1])))
    writing.start()
    with StandardInput(ends[0]) as source:
        first = source.for_child()
        got = b""
        while len(got) < read_bytes:
            got += os.read(first, read_bytes - len(got))
        os.close(first)
        source.end()
        second = source.for_child()
        again = b""
        while len(again) < read_bytes:
            again += os.read(second, read_bytes - len(again))
        os.close(second)
    assert (got, again) == (data[:read_bytes], data[:read_bytes])
    assert read_all(ends[0]) == data[read_bytes:]
    writing.join()


LOOPS = [
    "printf 'a\nb\nc\nd\n' | while read l; do echo $l; {} bash -c 'read x; echo read $x'; done",
    "seq 30000 | {{ {} head -c 2; wc; }}",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_in_a_shells_loop_it_takes_from_the_input_what_the_command_takes(loop, tmp_path):
    def shown(command: list[str]) -> bytes:
        line = loop.format(shlex.join(command))
        ran = subprocess.run(["bash", "-c", line], capture_output=True, timeout=LIMIT_S, check=False, cwd=tmp_path)
        assert ran.stderr == b""
        return ran.stdout

    assert shown(QUIET) == shown(["env"])


def test_a_file_is_read_again_from_where_it_stood(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"skipped\none\ntwo\n")
    fd = os.open(path, os.O_RDONLY)
    os.lseek(fd, 8, os.SEEK_SET)

    with StandardInput(fd) as source:
        for _ in range(2):
            assert source.for_child() is None
            assert os.read(fd, 100) == b"one\ntwo\n"
    os.close(fd)


def test_where_nothing_is_run_again_the_command_has_our_own(pipe):
    with StandardInput(pipe[0], keeps=False) as source:
        assert source.for_child() is None
        assert source.lost is None


def test_a_closed_standard_input_stays_closed():
    with StandardInput(987) as source:
        assert source.for_child() is None


def test_no_descriptor_is_left(pipe):
    def open_now() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_now()
    with StandardInput(pipe[0]) as source:
        for _ in range(5):
            os.close(source.for_child())
            source.end()
    assert open_now() == before


def test_a_pipe_that_is_open_for_writing_too_is_the_commands_own_and_no_relaunch_reads_it_again(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    both = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        with StandardInput(both) as source:
            assert source.for_child() is None
            assert source.lost == "standard input is a pipe that is open for writing too, which is the command's own"
    finally:
        os.close(both)


def test_one_read_gives_what_was_written_at_once(pipe):
    messages = [65_536, 10_000, 1]
    reader, writer = pipe
    with StandardInput(reader) as source:
        first = source.for_child()
        for size_bytes in messages:
            os.write(writer, b"x" * size_bytes)
            assert wait_for(lambda n=size_bytes: waiting_bytes(first) == n)
            assert len(os.read(first, 1 << 20)) == size_bytes
