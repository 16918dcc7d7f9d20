"""Standard input of a command that is run again: all of it, from its beginning."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

from oomguard.supervise import standard_input as module
from oomguard.supervise.standard_input import StandardInput


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
