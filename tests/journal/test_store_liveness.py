"""Whether a run is alive: the kernel knows it for this machine, and nothing is known of others."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import uuid

from oomguard.journal.store import LivenessLock, is_alive

HERE = platform.node()
HOLDER = """
import subprocess, sys
from oomguard.journal.store import LivenessLock
lock = LivenessLock(sys.argv[1])
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


def test_a_run_is_alive_until_it_releases_its_lock():
    session = uuid.uuid4().hex
    assert is_alive(session, HERE) is False
    lock = LivenessLock(session)
    assert is_alive(session, HERE) is True
    lock.release()
    assert is_alive(session, HERE) is False


def test_death_of_its_process_releases_it():
    session = uuid.uuid4().hex
    holding = [sys.executable, "-c", HOLDER, session]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        command = int(holder.stdout.readline())
        try:
            assert is_alive(session, HERE) is True
            holder.kill()
            holder.wait()
            assert is_alive(session, HERE) is False
        finally:
            os.kill(command, signal.SIGKILL)


def test_nothing_is_known_of_unnamed_or_other_machines():
    session = uuid.uuid4().hex
    assert (is_alive(session, f"not-{HERE}"), is_alive(session, None)) == (None, None)
