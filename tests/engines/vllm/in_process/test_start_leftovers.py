"""What a failed start left is ended and removed; what only looks like it is not touched."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import shared_memory

import pytest

from oomguard.engines.vllm.in_process import start
from oomguard.engines.vllm.in_process.message_receiver import started_ticks

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_ENDS_BY_ITSELF_S", 0.1)
    monkeypatch.setattr(start, "_ENDS_AFTER_TERM_S", 0.1)


@pytest.mark.usefixtures("_soon")
def test_a_process_that_spoke_and_does_not_end_is_killed():
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert start.end_processes({process.pid: started_ticks(process.pid)}) == ()
        assert process.wait(10) == -9


@pytest.mark.usefixtures("_soon")
def test_another_process_that_got_its_number_is_left_alone():
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ticks = started_ticks(process.pid)
        assert ticks is not None
        assert start.end_processes({process.pid: ticks - 1, 2**22 + 1: 5, 1: None}) == ()
        assert process.poll() is None
        process.kill()


def test_only_named_segments_are_removed_without_a_warning():
    code = """
from multiprocessing.shared_memory import SharedMemory
from oomguard.engines.vllm.in_process.start import remove_segments
ours, other = SharedMemory(create=True, size=16), SharedMemory(create=True, size=16)
assert remove_segments([ours.name, ours.name, "", "../etc/passwd", "psm_none"]) == (ours.name,)
SharedMemory(other.name).close()
other.unlink()
ours.close(); other.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_segment_of_another_name_stays():
    segment = shared_memory.SharedMemory(create=True, size=16)
    try:
        assert start.remove_segments([segment.name + "x"]) == ()
        shared_memory.SharedMemory(segment.name).close()
    finally:
        segment.close()
        segment.unlink()
