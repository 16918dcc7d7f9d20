"""Words are found in what a command prints while it runs."""

from __future__ import annotations

import threading

from oomguard.cluster.placement.placer import OutputWatcher
from oomguard.supervisor.output_buffer import SLOT_BYTES, OutputBuffer


def test_they_are_found_across_slots_and_once_for_each_time(monkeypatch):
    monkeypatch.setattr("oomguard.cluster.placement.placer.OUTPUT_POLL_S", 0.01)
    recording, found = OutputBuffer(), threading.Event()
    live = OutputWatcher(recording, b"took its memory", 2, found.set)
    recording.write(1, memoryview(b"x" * (SLOT_BYTES - 4) + b"took its memory\n"))
    assert not found.wait(0.2)
    recording.write(2, memoryview(b"and the other took its"))
    assert not found.wait(0.1)
    recording.write(2, memoryview(b" memory\n"))
    assert found.wait(10)
    live.stop()
    recording.close()


def test_it_ends_with_the_command_where_they_never_come():
    recording = OutputBuffer()
    live = OutputWatcher(recording, b"never", 1, lambda: None)
    live.stop()
    recording.close()
