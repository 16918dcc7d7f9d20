"""The witness of a process group: which signals the whole group had."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from oomguard.supervisor.reaper_process import SignalSentinel
from oomguard.supervisor.tree import is_busy_with
from support.supervising import wait_for

SENT_BY_KILL = 0  # SI_USER


@pytest.fixture
def witness():
    signals = {
        signal.SIGRTMIN,
        signal.SIGUSR1,
    }  # blocked, as the watcher has them when it forks: one that comes at once is noted
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        found = SignalSentinel(os.getpgrp(), [b"python", b"serve_zq.py"])
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
    assert wait_for(
        lambda: witness.had(int(signal.SIGRTMIN), SENT_BY_KILL, os.getpid(), came_s)
    )  # once it runs
    assert not witness.had(int(signal.SIGRTMIN), SENT_BY_KILL, os.getpid(), came_s)


def test_signal_to_oomguard_and_its_group_at_once_counts_once(witness):
    """So timeout signals; of two that are apart the second is another one, and real-time signals are never one."""
    for number, is_one in ((signal.SIGUSR1, True), (signal.SIGRTMIN, False)):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        try:
            os.kill(witness.pid, number)
            came_s = time.monotonic()
            assert wait_for(
                lambda n=number, s=came_s: witness.had(int(n), SENT_BY_KILL, os.getpid(), s)
            )
            assert witness.had(int(number), SENT_BY_KILL, os.getpid(), came_s + 0.001) is is_one
            assert not witness.had(int(number), SENT_BY_KILL, os.getpid(), came_s + 1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_process_that_has_not_handled_its_signal_yet_is_busy():
    """A sentinel that a busy machine has not run yet is waited for."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        process = subprocess.Popen(["sleep", "3600"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        assert wait_for(lambda: not is_busy_with(process.pid, signal.SIGUSR1))
        process.send_signal(signal.SIGUSR1)
        for _ in range(3):
            assert is_busy_with(process.pid, signal.SIGUSR1)
        assert not is_busy_with(process.pid, signal.SIGUSR2)
    finally:
        process.kill()
        process.wait()
    assert not is_busy_with(process.pid, signal.SIGUSR1)
