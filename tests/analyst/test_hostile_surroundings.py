"""Things around a run that are broken, hostile or used up: the command runs, and its status is its own."""

from __future__ import annotations

import os
import pwd
import shlex
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.supervising import LIMIT_S, RUN, wait_for

LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"


# A shell between the tests and the run: what a command does to its parent must never reach the tests' own process.
BEHIND_A_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")


def run(
    code: str, *options: str, behind: tuple[str, ...] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    command = [*behind, *RUN, *options, "--", "sh", "-c", code]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={**os.environ, **env},
    )


def test_a_reaper_that_is_stopped_is_continued():
    began_s = time.monotonic()
    ran = run("sleep 0.3; kill -STOP $PPID; echo on; exit 5", behind=BEHIND_A_SHELL)
    assert (ran.returncode, ran.stdout) == (5, "on\n")
    assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("first", ["", "sleep 0.2; "])
def test_a_command_that_kills_its_parent_is_killed_with_it(first):
    assert run(f"{first}kill -KILL $PPID; sleep 5; exit 5", behind=BEHIND_A_SHELL).returncode == 137


def test_no_variable_fakes_an_outer_run(tmp_path):
    code = f'if [ -n "$OOMGUARD_VLLM_OVERRIDES" ]; then exit 0; fi; cat {shlex.quote(str(LOG))}; exit 1'
    names = {"OOMGUARD_OUTER_RUN": str(os.getpid()), "XDG_STATE_HOME": str(tmp_path)}
    assert run(code, "--allow", "reduces-capacity", **names).returncode == 0


@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
def test_invalid_options_file_is_one_message_without_waiting(kind, tmp_path):
    folder = tmp_path / "oomguard"
    folder.mkdir()
    if kind == "fifo":
        os.mkfifo(folder / "config.toml")
    elif kind == "device":
        (folder / "config.toml").symlink_to("/dev/zero")
    else:
        (folder / "config.toml").write_text("a = " + "[" * 50_000)
    ran = run("exit 3", XDG_CONFIG_HOME=str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"oomguard: {folder / 'config.toml'}: ")
    assert "Traceback" not in ran.stderr


def test_folders_of_state_and_cache_are_their_users_alone(tmp_path):
    names = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run(f"cat {shlex.quote(str(LOG))}; exit 1", "--dry-run", **names)
    made = [tmp_path / kind / "oomguard" for kind in ("state", "cache")]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made if folder.exists()] == [
        0o700
    ] * 2


@pytest.mark.parametrize("value", ["1", " 1 ", "TRUE"])
def test_what_turns_everything_off_leaves_the_command_alone(value):
    ran = run("echo $PPID $OOMGUARD_OUTER_RUN; exit 6", OOMGUARD_DISABLE=value)
    assert (ran.returncode, ran.stdout) == (6, f"{os.getpid()}\n")


def test_a_port_that_is_taken_is_a_warning_and_the_command_runs():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--probes", "--metrics"):
            ran = run("exit 4", option, place)
            assert ran.returncode == 4
            assert "the run continues without" in ran.stderr


def test_silent_clients_exhaust_neither_probes_nor_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = shlex.quote(str(LOG))
    code = f'[ -n "$OOMGUARD_VLLM_OVERRIDES" ] && exit 0; while [ ! -e go ]; do sleep 0.1; done; cat {log}; exit 1'
    options = ("--probes", f"127.0.0.1:{port}", "--allow", "reduces-capacity")
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -n 128; exec "$@"', "sh", *RUN, *options, "--", "sh", "-c", code],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    ) as process:

        def answers() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                    client.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
                    return client.recv(100).startswith(b"HTTP/1.0 200")
            except OSError:
                return False

        assert wait_for(answers)
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        for client in held[::2]:
            client.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert answers()
        (tmp_path / "go").touch()
        assert process.wait(LIMIT_S) == 0
    for client in held:
        client.close()


@pytest.mark.parametrize("limit", [12, 16, 24])
def test_few_descriptors_cost_an_explanation_and_no_status(limit):
    code = "import resource, os, sys; resource.setrlimit(7, (int(sys.argv[1]),) * 2); os.execvp(sys.argv[2], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(limit), *RUN, "--", "sh", "-c", "echo out; exit 9"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (ran.returncode, ran.stdout) == (9, "out\n"), ran.stderr


def test_limits_too_low_for_oomguard_leave_the_command_alone():
    code = "import resource, os, sys; resource.setrlimit(7, (int(sys.argv[1]),) * 2); os.execvp(sys.argv[2], sys.argv[2:])"
    for limit in (6, 8, 10):
        command = [*RUN, "--", "/bin/sh", "-c", "echo out; exit 9"]
        ran = subprocess.run(
            [sys.executable, "-c", code, str(limit), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert (ran.returncode, ran.stdout) == (9, "out\n"), (limit, ran.stderr)
        assert "the command runs without it: Too many open files (see ulimit -n)" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_free_process_leaves_the_command_alone():
    try:
        user = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        pytest.skip("this machine has no user nobody")
    words = shlex.join([*RUN, "--", "/bin/sh", "-c", "echo out; exit 9"])
    keeps = ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    for limit in (3, 6, 12):
        ran = subprocess.run(
            [
                "setpriv",
                "--reuid",
                str(user),
                *keeps,
                "bash",
                "-c",
                f"ulimit -u {limit}; exec {words}",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        assert (ran.returncode, ran.stdout) == (9, "out\n"), (limit, ran.stderr)
        assert len(ran.stderr.splitlines()) <= 1


@pytest.mark.parametrize("limit_mib", [40, 80, 150])
def test_little_memory_costs_an_explanation_and_no_status(limit_mib):
    limits = f"ulimit -v {limit_mib * 1024}; exec"
    line = f"{limits} {shlex.join([*RUN, '--', 'sh', '-c', 'echo out; exit 9'])}"
    ran = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    if "python" in ran.stderr and "oomguard" not in ran.stderr:
        pytest.skip("Python itself does not start in so little")
    assert (ran.returncode, ran.stdout) == (9, "out\n"), ran.stderr
