"""oomguard run as a plain supervisor: streams, exit status, signals, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from support.each import each

LIMIT_S = 500  # what a machine under load may take
OOMGUARD = [sys.executable, "-m", "oomguard", "run", "-q", "--"]


def run(*command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    streams = {"capture_output": True, **options}
    return subprocess.run([*OOMGUARD, *command], timeout=LIMIT_S, check=False, **streams)


def start(*command: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*OOMGUARD, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def py(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", code


@each("status", [0, 3, 125])
def test_the_exit_status_is_the_commands_own(status):
    assert run("sh", "-c", f"exit {status}").returncode == status


def test_a_command_that_a_signal_ended_gives_128_plus_its_number():
    assert run("sh", "-c", "kill -9 $$").returncode == 137
    assert run("sh", "-c", "kill -TERM $$").returncode == 143


def test_both_streams_pass_through_byte_for_byte():
    data = bytes(range(256)) * 64
    code = "import os; d = bytes(range(256)) * 64; os.write(1, d); os.write(2, d[::-1])"
    ran = run(*py(code))
    assert ran.stdout == data
    assert ran.stderr == data[::-1]


def test_standard_input_reaches_the_command():
    assert run("cat", input=b"hello").stdout == b"hello"


def test_a_large_output_passes_whole():
    ran = run(
        *py(
            "import sys; sys.stdout.write('x' * 99 + '\\n'); [sys.stdout.write('y' * 99 + '\\n') for _ in range(200000)]"
        )
    )
    assert len(ran.stdout) == 100 * 200001


def test_output_arrives_while_the_command_runs():
    process = start(*py("import time; print('now'); time.sleep(30)"))
    try:
        assert process.stdout.readline() == b"now\n"
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)


def test_reader_that_goes_away_ends_the_command_as_usual():
    """``yes | head -1`` ends because yes finds its pipe closed; with oomguard between them it must too."""
    command = shlex.join([*OOMGUARD, "yes"])
    ran = subprocess.run(
        ["bash", "-c", f"{command} | head -1"], capture_output=True, timeout=LIMIT_S, check=False
    )
    assert ran.stdout == b"y\n"
    assert b"Traceback" not in ran.stderr


def waiting_ratio(pipe: IO[bytes]) -> float:
    """How full a pipe is."""
    (waiting_bytes,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
    return waiting_bytes / fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def test_a_paused_reader_does_not_hold_up_a_stop():
    command = [sys.executable, "-m", "oomguard", "run", "-q", "--grace", "1", "--", "yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while waiting_ratio(process.stdout) < 0.9:  # nobody reads: the pipe fills up
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LIMIT_S)
        assert process.returncode == 143


@pytest.mark.parametrize(
    ("stream", "code", "status"), [("stdout", "seq 3", 1), ("stderr", "seq 3 >&2; exit 3", 3)]
)
def test_lost_output_is_no_success_and_own_failure_stays(code, status, stream):
    with open("/dev/full", "wb") as full:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: full}
        bare = subprocess.run(["bash", "-e", "-c", code], **streams, check=False)
        ours = run("bash", "-c", code, capture_output=False, **streams)
    assert ours.returncode == status
    assert (bare.returncode == 0) == (status == 0)


def test_failed_analysis_keeps_the_status_and_names_the_output(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import oomguard.analyst.attempt_diagnosis as e\ndef broken(*_, **__): raise ZeroDivisionError('ours')\ne.AttemptDiagnoser.explain = broken\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = run(
        "sh",
        "-c",
        "echo printed; exit 3",
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    assert (ran.returncode, ran.stdout) == (3, b"printed\n")
    said = b'oomguard: oomguard could not explain the failure: reason="it failed: ZeroDivisionError: ours" output='
    assert ran.stderr.startswith(said)
    assert Path(ran.stderr.removeprefix(said).decode().strip()).read_bytes() == b"printed\n"


def test_unwritable_state_folder_does_not_stop_the_run():
    place = "/dev/null/x"
    ran = run("echo", "hi", env={**os.environ, "XDG_STATE_HOME": place})
    assert (ran.returncode, ran.stdout) == (0, b"hi\n")


def test_orphan_in_its_own_session_is_ended_without_delay(tmp_path):
    file = tmp_path / "pid"
    orphan = f"import os, time, pathlib; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(3 * {LIMIT_S})"
    code = (
        f"import pathlib, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)\n"
        f"file = pathlib.Path({str(file)!r})\nwhile not (file.exists() and file.read_text()): time.sleep(0.05)"
    )
    assert run(*py(code)).returncode == 0
    assert not psutil.pid_exists(int(Path(file).read_text()))


def test_output_to_one_stream_keeps_its_order():
    code = "import os\nfor n in range(500):\n os.write(1 + n % 2, b'%d ' % n)"
    ran = run(*py(code), capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ran.stdout.split() == [b"%d" % n for n in range(500)]


def test_disabled_comes_before_every_option(tmp_path):
    env = {**os.environ, "OOMGUARD_DISABLE": "1", "OOMGUARD_MAX_ATTEMPTS": "abc"}
    assert run("sh", "-c", "exit 5", env=env).returncode == 5
    assert run("no-such-command", env=env).returncode == 127


def test_disabled_means_the_command_alone():
    ran = run("sh", "-c", "echo $PPID; exit 5", env={**os.environ, "OOMGUARD_DISABLE": "1"})
    assert ran.returncode == 5
    assert int(ran.stdout) == os.getpid()


def test_a_terminal_child_can_read_standard_input(tmp_path):
    """Under a terminal the command shares our group, so it may read, and Ctrl-C reaches both."""
    import pty

    code = "import sys; print('got', sys.stdin.readline().strip())"
    pid, fd = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*OOMGUARD, *py(code)])
    os.write(fd, b"hello\n")
    output = b""
    try:
        while b"got hello" not in output:
            output += os.read(fd, 1024)
    except OSError:
        pass
    assert b"got hello" in output
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    os.close(fd)


def test_systemd_variables_for_the_process_are_the_commands():
    """As systemd starts it: the variable names oomguard."""
    name = "LISTEN_PID"
    code = f"import os; print(os.environ[{name!r}] == str(os.getpid()), os.environ['LISTEN_FDS'], os.fstat(3).st_ino > 0)"
    passed = os.open(os.devnull, os.O_RDONLY)
    shell = f"exec 3<&{passed}; {name}=$$ LISTEN_FDS=1 exec {shlex.join([*OOMGUARD, *py(code)])}"
    ran = subprocess.run(
        ["bash", "-c", shell], capture_output=True, pass_fds=[passed], timeout=LIMIT_S, check=True
    )
    os.close(passed)
    assert ran.stdout == b"True 1 True\n"
