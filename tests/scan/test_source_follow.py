"""Following a growing log: real files, changed while they are followed."""

from __future__ import annotations

import os
import threading
import time

import pytest

from oomguard.core.errors import InputError
from oomguard.scan.source import Event, LogChange, follow, follow_stream

POLL_S, QUIET_S = 0.01, 0.05


def collect(path, steps, *, until: int) -> list[Event]:
    """The events of ``path``; after each QUIET or WAITING the next step is done, until that many of them have come."""
    events, left = [], iter(steps)
    for event in follow(str(path), poll_s=POLL_S, quiet_s=QUIET_S):
        events.append(event)
        if event.change in {LogChange.QUIET, LogChange.WAITING}:
            until -= 1
            step = next(left, None)
            if step is not None:
                step()
            if until == 0:
                return events
    raise AssertionError("follow ended")


def told(events: list[Event]) -> list[object]:
    """The changes, neighbouring bytes joined."""
    joined: list[object] = []
    for event in events:
        if event.change is not LogChange.DATA:
            joined.append(event.change)
        elif joined and isinstance(joined[-1], bytes):
            joined[-1] += event.data
        else:
            joined.append(event.data)
    return joined


def append(path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"one\n")
    return path


def test_what_is_there_comes_first_then_what_is_added(log):
    events = collect(log, [lambda: append(log, b"two\n")], until=2)

    assert told(events) == [b"one\n", LogChange.QUIET, b"two\n", LogChange.QUIET]


def test_quiet_is_told_once_after_the_last_bytes(log):
    began = time.monotonic()
    events = collect(log, [], until=1)

    assert told(events) == [b"one\n", LogChange.QUIET]
    assert time.monotonic() - began >= QUIET_S


def test_missing_file_is_awaited_and_read_from_its_start(tmp_path):
    path = tmp_path / "later.log"
    events = collect(path, [lambda: path.write_bytes(b"now\n")], until=2)

    assert told(events) == [LogChange.WAITING, b"now\n", LogChange.QUIET]


def test_a_truncated_file_is_read_from_its_new_start(log):
    events = collect(log, [lambda: log.write_bytes(b"2\n")], until=2)

    assert told(events) == [b"one\n", LogChange.QUIET, LogChange.TRUNCATED, b"2\n", LogChange.QUIET]


def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(log, tmp_path):
    def rotate():
        append(log, b"last words\n")
        log.rename(tmp_path / "engine.log.1")
        log.write_bytes(b"new\n")

    events = collect(log, [rotate], until=2)

    assert told(events) == [
        b"one\n",
        LogChange.QUIET,
        b"last words\n",
        LogChange.REPLACED,
        b"new\n",
        LogChange.QUIET,
    ]


def test_a_removed_file_is_read_on_until_another_takes_its_name(log):
    with log.open("ab") as writer:

        def remove():
            log.unlink()
            writer.write(b"still\n")
            writer.flush()

        events = collect(log, [remove, lambda: log.write_bytes(b"new\n")], until=3)

    assert told(events) == [
        b"one\n",
        LogChange.QUIET,
        b"still\n",
        LogChange.QUIET,
        LogChange.REPLACED,
        b"new\n",
        LogChange.QUIET,
    ]


def test_a_name_that_points_to_another_file_is_followed_there(log, tmp_path):
    name, other = tmp_path / "latest.log", tmp_path / "other.log"
    name.symlink_to(log)
    other.write_bytes(b"other\n")

    def turn():
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(name)

    assert told(collect(name, [turn], until=2))[2:] == [
        LogChange.REPLACED,
        b"other\n",
        LogChange.QUIET,
    ]


def test_a_busy_file_comes_whole_and_in_order(log):
    lines = [b"line %d\n" % i for i in range(300)]

    def write():
        for line in lines:
            append(log, line)
            time.sleep(0.0005)

    thread = threading.Thread(target=write)
    thread.start()
    seen = b""
    try:
        for event in follow(str(log), poll_s=POLL_S, quiet_s=QUIET_S):
            seen += event.data
            if len(seen) >= len(b"one\n" + b"".join(lines)):
                break
    finally:
        thread.join()
    assert seen == b"one\n" + b"".join(lines)


@pytest.mark.parametrize("name", ["a\0b", "n" * 300])
def test_a_name_that_can_be_no_file_is_an_input_error(name):
    with pytest.raises(InputError):
        next(follow(name))


def test_a_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="Is a directory"):
        next(follow(str(tmp_path)))


def test_stream_ends_with_its_writer_and_reports_silence():
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as raw, open(writing, "wb", buffering=0) as pipe:
        events = follow_stream(raw, quiet_s=QUIET_S)
        pipe.write(b"one\n")
        assert next(events) == Event(LogChange.DATA, b"one\n")
        assert next(events) == Event(LogChange.QUIET)
        pipe.write(b"two\n")
        pipe.close()
        assert list(events) == [Event(LogChange.DATA, b"two\n")]
