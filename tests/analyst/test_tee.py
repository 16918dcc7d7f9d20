"""Output on its way: whole, in order, and each stream for itself, whatever its reader does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.streams import Tee

LIMIT_S = 120


class Copying:
    """A Python child's output on its way to descriptors of the test."""

    def __init__(self, code: str, out: int, errors: int | None = None, **options: object) -> None:
        stderr = subprocess.DEVNULL if errors is None else subprocess.PIPE
        self.child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            **options,
        )
        self.recording, self.stopping = OutputBuffer(), False
        self.tee = Tee(self.recording)
        self.tee.add(self.child.stdout, out)
        if errors is not None:
            self.tee.add(self.child.stderr, errors)
        self.thread = threading.Thread(target=self._pump)

    def _pump(self) -> None:
        self.tee.pump(lambda: self.child.poll() is not None, lambda: None, lambda: self.stopping)

    def __enter__(self) -> Copying:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(LIMIT_S)
        alive = self.thread.is_alive()
        self.child.kill()
        self.child.wait()
        self.recording.close()
        assert not alive, "the copying has not ended"


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as stream:
        return stream.read()


COUNT = "import sys\nfor n in range(200_000): sys.stdout.write(f'line {n}\\n')"
COUNTED = "".join(f"line {n}\n" for n in range(200_000)).encode()


@pytest.mark.parametrize("way", ["pipe", "file", "appended"])
def test_every_byte_arrives_in_order(way, tmp_path):
    if way == "pipe":
        reader, writer = os.pipe()
        got = []
        taking = threading.Thread(target=lambda: got.append(read_all(reader)))
        taking.start()
        with Copying(COUNT, writer):
            pass
        os.close(writer)
        taking.join()
        assert got == [COUNTED]
        return
    path = tmp_path / "out"
    path.write_bytes(b"before\n")
    fd = os.open(path, os.O_WRONLY | (os.O_APPEND if way == "appended" else os.O_TRUNC))
    with Copying(COUNT, fd):
        pass
    os.close(fd)
    assert path.read_bytes() == (b"before\n" if way == "appended" else b"") + COUNTED


def test_a_full_disk_does_not_end_the_command():
    with (
        open("/dev/full", "wb") as full,
        Copying("print('x' * 100_000)\nopen('/dev/null')", full.fileno()) as copying,
    ):
        assert copying.child.wait(LIMIT_S) == 0
        copying.thread.join(LIMIT_S)
        assert copying.tee.lost_bytes == {full.fileno(): 100_001}
        assert copying.recording.size == 100_001


def test_an_unread_stream_does_not_hold_up_the_other():
    out_reader, out_writer = os.pipe()
    error_reader, error_writer = os.pipe()
    code = (
        "import os, threading\n"
        "threading.Thread(target=lambda: os.write(2, b'e' * 3_000_000), daemon=True).start()\n"
        "for n in range(1000): os.write(1, b'o' * 1000)\n"
        "os.write(1, b'\\n')\n"
        "import time\n"
        "time.sleep(600)"
    )
    with Copying(code, out_writer, error_writer) as copying:
        got = b""
        while not got.endswith(b"\n"):
            got += os.read(out_reader, 65536)
        assert len(got) == 1_000_001
        copying.stopping = True
        copying.child.kill()
    for fd in (out_reader, out_writer, error_reader, error_writer):
        os.close(fd)


def test_a_reader_that_goes_away_closes_the_child_s_pipe():
    reader, writer = os.pipe()
    code = "import os, sys\ntry:\n    while True: os.write(1, b'x' * 1000)\nexcept BrokenPipeError:\n    sys.exit(3)"
    with Copying(code, writer) as copying:
        os.read(reader, 10)
        os.close(reader)
        assert copying.child.wait(LIMIT_S) == 3
    os.close(writer)


def test_an_orphan_that_holds_the_pipe_does_not_hold_us_up(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))"
    )
    reader, writer = os.pipe()
    with Copying(code, writer) as copying:
        copying.thread.join(LIMIT_S)
    os.kill(int(Path(pid).read_text()), 9)
    os.close(writer)
    assert read_all(reader) == b""


def test_slow_reader_gets_all_output_after_a_stop():
    """Its pipe is full for a moment while the command ends: that is no reader who has gone to sleep."""
    source, sink = os.pipe(), os.pipe()
    os.write(source[1], b"x" * 65_000)
    os.close(source[1])
    os.write(sink[1], b"y" * 65_000)
    read: list[bytes] = []

    def take() -> None:
        time.sleep(0.3)
        while data := os.read(sink[0], 65_536):
            read.append(data)

    reader = threading.Thread(target=take)
    reader.start()
    tee = Tee(OutputBuffer())
    tee.add(os.fdopen(source[0], "rb", buffering=0), sink[1])
    tee.pump(lambda: True, lambda: None, lambda: True)
    os.close(sink[1])
    reader.join()
    os.close(sink[0])
    assert sum(map(len, read)) == 130_000
