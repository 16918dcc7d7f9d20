"""The witness of a process group: which signals the whole group had."""

from __future__ import annotations

import os
import signal
import time

import pytest

from oomguard.supervise.witness import Witness
from support.supervising import wait_for

SENT_BY_KILL = 0  # SI_USER


@pytest.fixture
def witness():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})  # as the watcher has them when it forks
    try:
        found = Witness(os.getpgrp())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield found
    found.close()


def test_signals_of_a_burst_wait_together_for_the_groups(witness):
    """One alone waits for a twentieth of a second; a hundred that came at once do not take five seconds."""
    came_s = time.monotonic()
    assert not any(witness.had(int(signal.SIGRTMIN), SENT_BY_KILL, 1, came_s) for _ in range(100))
    assert time.monotonic() - came_s < 2.5


def test_what_the_whole_group_had_is_told_once(witness):
    os.kill(witness.pid, signal.SIGRTMIN)
    came_s = time.monotonic()
    assert wait_for(lambda: witness.had(int(signal.SIGRTMIN), SENT_BY_KILL, os.getpid(), came_s))  # once it runs
    assert not witness.had(int(signal.SIGRTMIN), SENT_BY_KILL, os.getpid(), came_s)
