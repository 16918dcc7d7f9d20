"""On a terminal a run diagnoses, runs again and ends as it does elsewhere, and what it says itself comes out as always."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from support.driving import sitting_at, transcript
from support.supervising import LIMIT_S, QUIET, RUN, wait_for

HERE = Path(__file__).parent
PY = sys.executable
ENGINE = [PY, str(HERE / "fake_engine.py")]
# Tells whether its output is a terminal, then is the engine.
SHOWING = [
    PY,
    "-c",
    f"import os, sys; print('TTY', os.isatty(1), flush=True); os.execv(sys.executable, {ENGINE} + sys.argv[1:])",
]
JOB_SHELL = [PY, str(HERE / "job_shell.py")]


def test_each_attempt_has_a_terminal_and_its_messages_are_right():
    shown = transcript([*RUN, "--allow", "reduces-capacity", "--", *SHOWING])
    assert shown.count(b"TTY True\r\n") == 2
    assert b"RESULT 1792\r\n" in shown
    assert b"What oomguard did" in shown
    assert shown.count(b"\n") == shown.count(b"\r\n")
    assert b"\r\r" not in shown


def test_a_failure_is_diagnosed_as_through_a_pipe(tmp_path):
    def diagnosed(name: str) -> dict[str, object]:
        """A terminal is one stream, so that lines count through."""
        return json.loads(re.sub(r"line \d+: ", "line: ", (tmp_path / name).read_text()))

    def command(name: str) -> list[str]:
        return [
            *RUN,
            "-q",
            "--max-attempts",
            "1",
            "--report",
            str(tmp_path / name),
            "--",
            *ENGINE,
        ]

    transcript(command("terminal.json"))
    subprocess.run([*command("pipe.json")], capture_output=True, timeout=LIMIT_S, check=False)
    ours, theirs = diagnosed("terminal.json"), diagnosed("pipe.json")
    assert ours["incidents"]
    for one in (ours, theirs):
        for attempt in one.get("attempts", ()):
            attempt.pop("seconds", None)
    import pprint

    a, b = pprint.pformat(ours).split("\n"), pprint.pformat(theirs).split("\n")
    import difflib

    print("\n".join(difflib.unified_diff(a, b, n=0)))
    assert ours == theirs


def test_shell_that_restores_nothing_finds_its_terminal_intact():
    """job_shell leaves the modes alone: after a kill only the watcher can have restored them."""
    with sitting_at(
        [*JOB_SHELL, *QUIET, PY, "-c", "print('READY', flush=True); import time; time.sleep(3600)"]
    ) as terminal:
        before = terminal.modes
        job = int(terminal.until(rb"JOB (\d+)").group(1))
        terminal.until(b"READY")
        assert terminal.is_raw
        tree = psutil.Process(job).children(recursive=True)
        os.kill(job, signal.SIGKILL)
        terminal.until(b"STATUS")
        assert wait_for(lambda: terminal.modes == before)
        assert psutil.wait_procs(tree, timeout=LIMIT_S)[1] == []


def test_a_terminal_that_goes_away_is_one_hangup(tmp_path):
    """All of the job has it, not its first process alone."""
    notes = tmp_path / "notes"
    code = (
        "import os, signal, sys, time\n"
        f"fd = os.open({str(notes)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND)\n"
        "signal.signal(signal.SIGHUP, lambda *_: os.write(fd, b'HUP\\n'))\n"
        "print('READY', flush=True)\nend = time.monotonic() + 2\n"
        "while time.monotonic() < end: time.sleep(0.1)\nos.write(fd, b'END\\n')"
    )
    leader, master = pty.fork()
    if leader == 0:
        os.execv(PY, [*QUIET, "sh", "-c", 'trap : HUP; "$@"; :', "sh", PY, "-c", code])
    shown = b""
    while b"READY" not in shown:
        shown += os.read(master, 100)
    tree = psutil.Process(leader).children(recursive=True)
    os.close(master)
    os.waitpid(leader, 0)
    assert psutil.wait_procs(tree, timeout=LIMIT_S)[1] == []
    assert notes.read_text() == "HUP\nEND\n"


def test_missing_second_terminal_means_a_pipe_and_a_message(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\ndef none(): raise OSError(28, 'No space left on device')\nos.openpty = none\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import os; print([os.isatty(n) for n in (0, 1, 2)])"
    with sitting_at([*RUN, "--", PY, "-c", code], env={"PYTHONPATH": path}) as terminal:
        shown = terminal.end()
    assert (
        b'The command\'s output is not a terminal, because none is free: reason="No space left on device"\r\n'
        in shown
    )
    assert b"[True, False, False]\r\n" in shown


def test_a_stop_key_is_a_stop_nothing_is_run_again_after_it():
    code = (
        "import os, signal, sys, time\n"
        f"def fail(*_): os.execv(sys.executable, {ENGINE})\n"
        "signal.signal(signal.SIGINT, fail)\nprint('READY', flush=True)\ntime.sleep(3600)"
    )
    shown = transcript(
        [*RUN, "--allow", "reduces-capacity", "--", PY, "-c", code], [(b"READY\r\n", b"\x03")]
    )
    assert b"out of memory" in shown or b"max_model_len" in shown
    assert b"Running the command again" not in shown


def test_command_that_handles_ctrl_c_continues_at_once():
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, lambda *_: os.write(1, b'GOT\\n'))\nprint('READY', flush=True)\n"
        "while True: print('LINE', sys.stdin.readline().strip(), flush=True)"
    )
    with sitting_at([*JOB_SHELL, *RUN, "-q", "--grace", "1", "--", PY, "-c", code]) as terminal:
        terminal.until(b"READY\r\n")
        for _ in range(5):
            terminal.type(b"\x03")
            terminal.until(b"GOT\r?\n")
        assert not wait_for(lambda: b"STATUS" in terminal.shown or not terminal._read(), 2)
        terminal.type(b"one\r")
        terminal.until(b"LINE one")
