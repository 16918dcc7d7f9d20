"""The exit status where nobody takes what is printed: never the 120 with which Python ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.supervising import LIMIT_S

OOMGUARD = [sys.executable, "-m", "oomguard"]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."


@pytest.fixture
def full() -> Iterator[int]:
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def gone() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "error.log"
    path.write_text(OOM + "\n")
    return path


def ended(*arguments: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    # Python keeps no bytes back where this is set, and the failure would not show.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([*OOMGUARD, *arguments], timeout=LIMIT_S, check=False, env=env, **streams)


def run_both(code: int, stdout: int, stderr: int) -> int:
    printing = ["sh", "-c", f"trap '' PIPE; echo hi; echo ho >&2; exit {code}"]
    return ended("run", "--", *printing, stdout=stdout, stderr=stderr).returncode


@pytest.mark.parametrize(("streams", "code"), [("stdout", 0), ("both", 3)])
def test_run_with_a_full_output_ends_with_status_or_1(streams, code, full):
    stdout = full if streams != "stderr" else subprocess.DEVNULL
    stderr = full if streams != "stdout" else subprocess.DEVNULL
    assert run_both(code, stdout, stderr) == (code or 1)


@pytest.mark.parametrize(("streams", "code"), [("stdout", 0), ("both", 3)])
def test_run_without_a_reader_ends_with_the_commands_status(streams, code, gone):
    stdout = gone if streams != "stderr" else subprocess.DEVNULL
    stderr = gone if streams != "stdout" else subprocess.DEVNULL
    assert run_both(code, stdout, stderr) == code


def test_unread_closing_message_keeps_the_commands_status(full, gone):
    for stderr in (full, gone):
        failing = ["sh", "-c", f"echo '{OOM}'; exit 3"]
        assert ended("run", "-v", "--no-pty", "--", *failing, stderr=stderr).returncode == 3


PRINTING = [["--help"], ["diagnose"]]


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_what_is_printed_on_a_full_disk_is_one_line_and_status_2(command, full, log):
    ran = ended(*command, *([str(log)] if "diagnose" in command else []), stdout=full)
    assert (ran.returncode, ran.stderr) == (
        2,
        b"oomguard: standard output: No space left on device\n",
    )


@pytest.mark.parametrize("command", PRINTING, ids=" ".join)
def test_output_to_a_gone_reader_ends_as_by_sigpipe(command, gone, log):
    ran = ended(*command, *([str(log)] if "diagnose" in command else []), stdout=gone)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_full_standard_error_does_not_change_the_findings(full, log):
    assert ended("diagnose", "--exit-code", str(log), stderr=full).returncode == 1
