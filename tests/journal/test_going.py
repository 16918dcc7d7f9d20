"""Whether a run goes on: told by the kernel for those of this machine, not known of others."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import uuid

from oomguard.journal.going import Going, goes_on

HERE = platform.node()
HOLDER = """
import subprocess, sys
from oomguard.journal.going import Going
going = Going(sys.argv[1])
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


def test_it_goes_on_until_it_says_otherwise():
    session = uuid.uuid4().hex
    assert goes_on(session, HERE) is False
    going = Going(session)
    assert goes_on(session, HERE) is True
    going.end()
    assert goes_on(session, HERE) is False


def test_the_death_of_its_process_ends_it_though_its_command_lives():
    session = uuid.uuid4().hex
    holding = [sys.executable, "-c", HOLDER, session]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        command = int(holder.stdout.readline())
        try:
            assert goes_on(session, HERE) is True
            holder.kill()
            holder.wait()
            assert goes_on(session, HERE) is False
        finally:
            os.kill(command, signal.SIGKILL)


def test_of_another_machine_and_of_one_without_a_name_nothing_is_known():
    session = uuid.uuid4().hex
    assert (goes_on(session, f"not-{HERE}"), goes_on(session, None)) == (None, None)
