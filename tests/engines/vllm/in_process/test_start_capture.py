"""What is printed while an engine starts: copied as it comes, kept for the diagnosis, and the descriptor given back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomguard.engines.vllm.in_process.start import Capture


@pytest.fixture
def target(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A descriptor of the process's own that leads to a file."""
    path = tmp_path / "out"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    yield descriptor, path
    os.close(descriptor)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pumps() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "oomguard-pump"]


def test_what_this_process_and_a_child_print_arrives_and_is_kept(target):
    descriptor, path = target
    before = descriptors()
    capture = Capture(descriptor)
    capture.begin()
    os.write(descriptor, b"mine\n")
    subprocess.run(
        [sys.executable, "-c", "import os; os.write(1, b'theirs\\n')"],
        stdout=descriptor,
        check=True,
    )
    capture.end()
    os.write(descriptor, b"afterwards\n")
    assert path.read_bytes() == b"mine\ntheirs\nafterwards\n"
    assert capture.text() == "mine\ntheirs\n"
    for pump in pumps():
        pump.join(10)
    assert descriptors() == before


def test_later_started_process_keeps_printing(target):
    descriptor, path = target
    capture = Capture(descriptor)
    capture.begin()
    code = "import os, sys; sys.stdin.readline(); os.write(1, b'x' * 300_000)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=descriptor
    ) as process:
        capture.end()
        assert capture.text() == ""
        process.communicate(b"\n", timeout=60)
    for pump in pumps():
        pump.join(10)
    assert path.stat().st_size == 300_000
    assert pumps() == []


def test_a_reader_that_is_gone_does_not_hold_up_who_prints():
    reading, writing = os.pipe()
    capture = Capture(writing)
    os.close(reading)
    capture.begin()
    for _ in range(100):
        os.write(writing, b"x" * 10_000)
    capture.end()
    assert len(capture.text()) >= 300_000
    os.close(writing)


def test_a_descriptor_that_is_closed_is_left_alone():
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    before = descriptors()
    capture = Capture(writing)
    capture.begin()
    capture.end()
    assert capture.text() == ""
    assert descriptors() == before
