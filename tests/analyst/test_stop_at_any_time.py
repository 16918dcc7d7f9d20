"""A stop at any moment of the start, an attempt, its diagnosis and the relaunch: one status, no traceback, nothing left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import oomguard
from support.supervising import LIMIT_S, RUN, left, marked, wait_for

ENGINE = Path(__file__).with_name("fake_engine.py")
OURS = re.compile(rf'File "{re.escape(str(Path(oomguard.__file__).parent))}/')
# Seconds after the start. A run of the failing engine takes 1 to 2; the engine that fits then waits.
MOMENTS_S = [0.5, 1.5]


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_a_stop_at_any_moment_is_a_stop(moment_s, tmp_path):
    number = signal.SIGINT
    mark = f"stop-{os.getpid()}-{time.monotonic_ns()}"
    command = [
        *RUN,
        "--journal",
        str(tmp_path / "journal"),
        "--",
        sys.executable,
        str(ENGINE),
        "--mode",
        "wait",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=marked(mark, {"TMPDIR": str(tmp_path)}),
    ) as process:
        time.sleep(moment_s)
        process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    # Before oomguard's first line the signal itself ends Python, which a shell shows as the same 128 + n. A command that was
    # ending of itself when the stop came has the last word: its status is 1, and it is not run again.
    own = [1] if "RESULT" not in output and "READY" not in output else []
    assert process.returncode in [128 + number, -number, *own], errors
    assert not OURS.search(errors), errors
    assert wait_for(lambda: left(mark) == [])
    assert list(tmp_path.glob("oomguard-*")) == []


@pytest.mark.parametrize("event", ["Attempt ended: number=1", "Running the command again"])
def test_a_stop_at_each_event_is_a_stop(event, tmp_path):
    """Between the attempts nothing has the last word but the stop."""
    number = signal.SIGTERM
    mark = f"event-{os.getpid()}-{time.monotonic_ns()}"
    own = ["-v", "--journal", str(tmp_path / "journal")]
    command = [*RUN, *own, "--", sys.executable, str(ENGINE), "--mode", "wait"]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=marked(mark, {"TMPDIR": str(tmp_path)}),
    ) as process:
        for line in process.stderr:
            if event in line:
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, errors
    assert not OURS.search(errors), errors
    assert left(mark) == []
    assert list(tmp_path.glob("oomguard-*")) == []


@pytest.mark.parametrize("own", [0, 3])
def test_a_late_stop_keeps_the_status_of_a_success(own, tmp_path):
    """The tree is being ended: a process that the command left holds neither of its streams."""
    number = signal.SIGTERM
    mark = f"late-{os.getpid()}-{time.monotonic_ns()}"
    code = f"sleep 60 >/dev/null 2>&1 & echo READY; exit {own}"
    with subprocess.Popen(
        [*RUN, "--journal", str(tmp_path / "journal"), "--", "sh", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=marked(mark, {"TMPDIR": str(tmp_path)}),
    ) as process:
        assert process.stdout.readline() == "READY\n"
        time.sleep(0.5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == (0 if own == 0 else 128 + number), errors
    assert wait_for(lambda: left(mark) == [])


def test_a_burst_of_stops_leaves_nothing_either(tmp_path):
    mark = f"burst-{os.getpid()}-{time.monotonic_ns()}"
    command = [
        *RUN,
        "--journal",
        str(tmp_path / "journal"),
        "--",
        sys.executable,
        str(ENGINE),
        "--mode",
        "wait",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=marked(mark, {"TMPDIR": str(tmp_path)}),
    ) as process:
        for line in process.stderr:
            if "number=2" in line:
                break
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode in {130, 137, -2}, (
        errors
    )  # a late one may end oomguard itself, its work done
    assert not OURS.search(errors), errors
    assert wait_for(lambda: left(mark) == [])
