"""What a command, a descriptor or a journal can be that it should not: one line and a status, or the run goes on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from oomguard.engines.command import Launch
from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.process import NotStartedError, run_once
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import StandardInput
from support.each import each
from support.supervising import LIMIT_S, QUIET, RUN

HI = ["sh", "-c", "echo hi; exit 7"]


def ran(*command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*QUIET, *command], capture_output=True, timeout=LIMIT_S, check=False, **options
    )


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder of files that somebody may take for commands."""
    for name, content, mode in (
        ("no-interpreter-line", b"echo ran $1; exit 5\n", 0o755),
        ("lost-interpreter", b"#!/no/such/interpreter\n", 0o755),
        ("not-executable", b"#!/bin/sh\necho ran\n", 0o644),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    return tmp_path


CASES = {
    "lost-interpreter": (127, b"its interpreter does not exist"),
    "not-executable": (126, b"cannot be executed"),
    "absent": (127, b"command not found"),
}


@pytest.mark.parametrize("name", CASES)
def test_unrunnable_command_is_one_line_and_a_shells_status(commands, name):
    status, said = CASES[name]
    ended = ran(str(commands / name))
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_text_without_an_interpreter_line_runs_in_the_shell(commands):
    ended = ran(str(commands / "no-interpreter-line"), "well")
    assert (ended.returncode, ended.stdout) == (5, b"ran well\n")


@each("launch", [Launch(("a\0b",)), Launch(("true",), {"A": "b\0c"})])
def test_a_nul_in_a_word_or_a_variable_is_a_launch_error(launch):
    with SignalForwarder() as signals, pytest.raises(NotStartedError, match="null byte") as caught:
        run_once(launch, OutputBuffer(), signals, StandardInput())
    assert caught.value.status == 126


def test_words_that_are_too_many_for_the_system_are_126():
    with (
        SignalForwarder() as signals,
        pytest.raises(NotStartedError, match="Argument list too long") as caught,
    ):
        run_once(Launch(("true", "x" * 3_000_000)), OutputBuffer(), signals, StandardInput())
    assert caught.value.status == 126


def test_words_and_variables_that_are_no_text_arrive_as_they_are():
    command = [*QUIET, "sh", "-c", 'printf %s "$1$V"', "sh", b"\xff\xfe"]
    ended = subprocess.run(
        command,
        capture_output=True,
        env={**os.environb, b"V": b"\xfd"},
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.stdout == b"\xff\xfe\xfd"


def test_closed_standard_streams_cost_nothing(tmp_path):
    """The next file that is opened would take their place: the command's own output would go into it."""
    script = '"$@" <&- >&- 2>&-'
    trace = tmp_path / "ran"
    command = [
        "bash",
        "-c",
        script,
        "bash",
        *RUN,
        "--",
        "sh",
        "-c",
        f"echo hi; echo no >&2; echo ran > '{trace}'; exit 7",
    ]
    ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 7, ended.stderr
    assert trace.read_text() == "ran\n"
    assert (ended.stdout, ended.stderr) == (b"", b"")


def test_without_a_home_folder_it_runs(tmp_path):
    env = {**os.environ, "HOME": "/proc/no/such/home"}
    del env["XDG_STATE_HOME"], env["XDG_CACHE_HOME"]
    ended = ran(*HI, env=env, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (7, b"hi\n")
    assert list(tmp_path.glob("~*")) == []


def locked(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    return database


def test_a_journal_that_cannot_be_kept_is_a_warning(tmp_path):
    path = tmp_path / "journal.sqlite3"
    path.write_text("dear diary, " * 400)
    command = [*RUN, "--journal", str(path), "--", *HI]
    ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (7, b"hi\n"), ended.stderr
    said = [line for line in ended.stderr.splitlines() if b"journal" in line]
    assert len(said) == 1
    assert b"Traceback" not in ended.stderr


def test_a_locked_journal_is_a_warning_and_nobody_waits_for_it(tmp_path):
    path = tmp_path / "journal.sqlite3"
    command = [*RUN, "--journal", str(path), "--", *HI]
    subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    with closing(locked(path)):
        began = time.monotonic()
        ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        took_s = time.monotonic() - began
    assert ended.returncode == 7
    assert b"Not recording this run: the journal cannot be opened" in ended.stderr
    assert took_s < 8  # it was 10 s and more
