"""What a command, a descriptor or a journal can be that it should not: one line and a status, or the run goes on."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from oomguard.engines.command import Launch
from oomguard.errors import LaunchError
from oomguard.supervise.process import run_once
from oomguard.supervise.recording import Recording
from oomguard.supervise.signals import Signals
from oomguard.supervise.standard_input import StandardInput
from support.each import each
from support.supervising import LIMIT_S, QUIET, RUN

HI = ["sh", "-c", "echo hi; exit 7"]


def ran(*command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*QUIET, *command], capture_output=True, timeout=LIMIT_S, check=False, **options)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder of files that somebody may take for commands."""
    (tmp_path / "folder").mkdir()
    for name, content, mode in (
        ("no-interpreter-line", b"echo ran $1; exit 5\n", 0o755),
        ("binary", b"\0\1\2\3not a program", 0o755),
        ("lost-interpreter", b"#!/no/such/interpreter\n", 0o755),
        ("not-executable", b"#!/bin/sh\necho ran\n", 0o644),
    ):
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    return tmp_path


CASES = {
    "folder": (126, b"is a directory"),
    "binary": (126, b"is no program for this machine"),
    "lost-interpreter": (127, b"its interpreter is not there"),
    "not-executable": (126, b"cannot be executed"),
    "absent": (127, b"command not found"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_run_is_one_line_and_the_status_of_a_shell(commands, name):
    status, said = CASES[name]
    ended = ran(str(commands / name))
    assert ended.returncode == status, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_text_without_an_interpreter_line_is_the_shells_with_its_arguments(commands):
    ended = ran(str(commands / "no-interpreter-line"), "well")
    assert (ended.returncode, ended.stdout) == (5, b"ran well\n")


@each("name", ["", "-x", "x" * 5000])
def test_a_name_that_is_none_is_not_found(name):
    ended = ran(name)
    assert ended.returncode in {126, 127}
    assert ended.returncode == 127 or len(name) > 255  # a name too long is an error of its own
    assert b"Traceback" not in ended.stderr


def test_a_file_of_that_name_that_is_not_executable_does_not_hide_one_further_on_in_the_path(tmp_path):
    for folder, mode in (("first", 0o644), ("second", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").write_text("#!/bin/sh\necho second\n")
        (tmp_path / folder / "tool").chmod(mode)
    path = os.pathsep.join([str(tmp_path / "absent"), str(tmp_path / "first"), str(tmp_path / "second"), "/bin"])
    assert ran("tool", env={**os.environ, "PATH": path}).stdout == b"second\n"
    path = os.pathsep.join([str(tmp_path / "first"), "/bin"])
    assert ran("tool", env={**os.environ, "PATH": path}).returncode == 126


@each("launch", [Launch(("a\0b",)), Launch(("true",), {"A": "b\0c"})])
def test_a_nul_in_a_word_or_a_variable_is_a_launch_error(launch):
    with Signals() as signals, pytest.raises(LaunchError, match="null byte") as caught:
        run_once(launch, Recording(), signals, StandardInput())
    assert caught.value.exit_status == 126


def test_words_that_are_too_many_for_the_system_are_126():
    with Signals() as signals, pytest.raises(LaunchError, match="Argument list too long") as caught:
        run_once(Launch(("true", "x" * 3_000_000)), Recording(), signals, StandardInput())
    assert caught.value.exit_status == 126


def test_a_large_environment_and_many_words_arrive_whole():
    env = {**os.environ, **{f"V{number}": "x" * 1000 for number in range(500)}}
    ended = ran(
        sys.executable,
        "-c",
        "import os, sys; print(len(sys.argv), os.environ['V499'] == 'x' * 1000)",
        *["w"] * 5000,
        env=env,
    )
    assert ended.stdout == b"5001 True\n"


def test_words_and_variables_that_are_no_text_arrive_as_they_are():
    command = [*QUIET, "sh", "-c", 'printf %s "$1$V"', "sh", b"\xff\xfe"]
    ended = subprocess.run(
        command, capture_output=True, env={**os.environb, b"V": b"\xfd"}, timeout=LIMIT_S, check=False
    )
    assert ended.stdout == b"\xff\xfe\xfd"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_when_we_start_cost_nothing(closed, tmp_path):
    """The next file that is opened would take their place: the command's own output would go into it."""
    script = f'"$@" {closed}'
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
    assert ended.stdout == (b"" if " >&-" in f" {closed}" else b"hi\n")
    assert (b"no\n" in ended.stderr) is ("2>&-" not in closed)
    assert b"Traceback" not in ended.stderr


def test_a_working_folder_that_is_removed_costs_nothing(tmp_path):
    """It fails of memory too, so that the diagnosis runs without a working folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    engine = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
    script = 'cd "$0"; "$@"'
    inner = ["sh", "-c", f"[ -d '{folder}' ] && rmdir '{folder}'; exec \"$@\"", "sh", *engine]
    command = ["bash", "-c", script, str(folder), *RUN, "--", *inner]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    assert not folder.exists()
    assert ended.returncode == 0, ended.stderr
    assert "RESULT 1792" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("home", [None, "/proc/no/such/home"])
def test_without_a_home_folder_it_runs(home, tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "HOME"}
    env |= {} if home is None else {"HOME": home}
    # Without XDG_* everything would go below HOME, which is the user's own where it is not given.
    if home == "/proc/no/such/home":
        del env["XDG_STATE_HOME"], env["XDG_CACHE_HOME"]
    ended = ran(*HI, env=env, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (7, b"hi\n")
    assert list(tmp_path.glob("~*")) == []


def locked(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    return database


def spoiled_journal(kind: str, tmp_path: Path) -> Path:
    """A place where no journal can be kept."""
    path = tmp_path / "journal.sqlite3"
    if kind == "of a newer version":
        subprocess.run([*RUN, "-q", "--journal", str(path), "--", "true"], check=True)
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA user_version = 99")
    elif kind == "no database":
        path.write_text("dear diary, " * 400)
    elif kind == "below a file":
        path.touch()
        path /= "below"
    elif kind == "a pipe":
        os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "no database",
        "of a newer version",
        "below a file",
        "a pipe",
    ],
)
def test_a_journal_that_cannot_be_kept_is_a_warning(kind, tmp_path):
    path = spoiled_journal(kind, tmp_path)
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
    assert b"no journal is kept" in ended.stderr
    assert took_s < 8  # it was 10 s and more


def test_a_state_folder_that_only_can_be_read_costs_nothing(tmp_path):
    """Another user's: as the superuser only a read-only file system refuses."""
    state = tmp_path / "state"
    state.mkdir(mode=0o555)
    command: list[str] = [*RUN, "--", *HI]
    if os.geteuid() == 0:
        mount = f"mount -t tmpfs -o ro none '{state}' && exec \"$@\""
        command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
        if (
            not shutil.which("unshare")
            or subprocess.run([*command[:5], "sh", "true"], capture_output=True, check=False).returncode
        ):
            pytest.skip("unshare cannot mount a read-only folder here")
    ended = subprocess.run(
        command, capture_output=True, timeout=LIMIT_S, check=False, env={**os.environ, "XDG_STATE_HOME": str(state)}
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"hi\n", b"")
