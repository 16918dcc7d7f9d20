"""A start that will not end is ended: a core that said that it failed, its workers first, and one that takes longer than it may."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context

import pytest

from oomguard.engines.vllm.in_process import message_sender, start
from oomguard.engines.vllm.in_process.message_receiver import CORE_FAILED, MessageReceiver
from oomguard.engines.vllm.in_process.start import StartupWatchdog
from oomguard.engines.vllm.plugin import LISTENER

Process = get_context("fork").Process
# A worker that ignores SIGTERM, and a core that waits for it once it has said its words.
WORKER = """
import signal, sys, time
from oomguard.engines.vllm.plugin import register
signal.signal(signal.SIGTERM, signal.SIG_IGN)
register()
print("ready", flush=True)
time.sleep(120)
"""
CORE = """
import logging, subprocess, sys
from oomguard.engines.vllm.plugin import register
register()
worker = subprocess.Popen([sys.executable, "-c", {worker!r}], stdout=subprocess.PIPE, text=True)
worker.stdout.readline()
logging.getLogger("vllm.core").{say}
print(worker.pid, flush=True)
worker.wait()
sys.exit(3)
"""


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageReceiver]:
    monkeypatch.setattr(start, "LOOKS_EVERY_S", 0.05)
    monkeypatch.setattr(start, "ENDS_WITHIN_S", 0.5)
    made = MessageReceiver()
    made.open()
    yield made
    message_sender.stop_sending()
    made.close()


@contextlib.contextmanager
def core(listener: MessageReceiver, say: str) -> Iterator[subprocess.Popen[str]]:
    code = CORE.format(worker=WORKER, say=say)
    env = {**os.environ, LISTENER: str(listener.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, 9)


def test_failed_core_ends_once_its_worker_is_killed(
    listener,
):
    with (
        StartupWatchdog(listener, None).running() as watched,
        core(listener, f"error({CORE_FAILED!r})") as process,
    ):
        assert process.wait(30) == 3
    assert watched.ended_because is None


def test_what_has_not_started_in_time_is_killed(listener):
    with (
        core(listener, "info('loading')") as process,
        StartupWatchdog(listener, 0.5).running() as watched,
    ):
        assert process.wait(30) == -9
    assert watched.ended_because == "stopped the start, because it took over 0.5 s"


def test_what_nobody_waits_for_any_more_is_killed(listener):
    given_up: list[bool] = []
    watch = StartupWatchdog(listener, None, lambda: bool(given_up))
    with watch.running() as watched, core(listener, "info('loading')") as process:
        assert watched.ended_because is None
        given_up.append(True)
        assert process.wait(30) == -9
    assert watched.ended_because == "stopped the start, because its caller no longer waits for it"


def test_silent_core_is_killed_too_and_no_other_child(listener):
    with StartupWatchdog(listener, 0.2).running():
        children = [
            Process(target=time.sleep, args=(60,), name=name)
            for name in ("EngineCore", "EngineCore_DP1", "mine")
        ]
        for child in children:
            child.start()
        try:
            for core_ in children[:2]:
                core_.join(10)
            assert [child.exitcode for child in children] == [-9, -9, None]
        finally:
            for child in children:
                child.kill()
                child.join()


def test_a_core_of_an_earlier_start_is_left_alone(listener):
    before = Process(target=time.sleep, args=(60,), name="EngineCore")
    before.start()
    try:
        with StartupWatchdog(listener, 0.1).running() as watched:
            while watched.ended_because is None:
                time.sleep(0.02)
            time.sleep(0.2)
        assert before.is_alive()
    finally:
        before.kill()
        before.join()


def test_a_core_that_did_not_fail_is_left_alone(listener):
    with (
        StartupWatchdog(listener, None).running(),
        core(listener, "error('one request failed')") as process,
    ):
        time.sleep(1.5)
        assert process.poll() is None


def test_process_that_reuses_a_pid_is_left_alone(listener):
    with core(listener, f"error({CORE_FAILED!r})") as process:
        listener.settle()
        listener.senders = {pid: (ticks or 0) - 1 for pid, ticks in listener.senders.items()}
        with StartupWatchdog(listener, 0.1).running():
            time.sleep(1.5)
        assert process.poll() is None


def test_the_watch_ends_with_the_start(listener):
    with StartupWatchdog(listener, 1000.0).running():
        assert "oomguard-start-watch" in {thread.name for thread in start.threading.enumerate()}
    assert "oomguard-start-watch" not in {thread.name for thread in start.threading.enumerate()}
