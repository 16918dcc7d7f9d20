"""The end of a command that failed: what it left running is looked at before it is ended."""

from __future__ import annotations

import psutil

from oomguard.supervisor import tree
from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.process import Command, run_once
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import StandardInput
from support.each import each


@each(("status", "looks"), [(0, 0), (3, 1)])
def test_remains_of_a_failed_command_are_checked_while_it_runs(status, looks):
    left = []
    with SignalForwarder() as signals:
        source = StandardInput()
        recording = OutputBuffer()
        ended = run_once(
            Command(("sh", "-c", f"sleep 600 >/dev/null 2>&1 & exit {status}"), {}),
            recording,
            signals,
            source,
            on_failing=lambda: left.append(len(commands_below(signals.reaper.pid))),
        )
        recording.close()

    assert ended.status == status
    assert left == [1] * looks


def commands_below(root: int) -> list[int]:
    """The processes below the watcher that are not its own."""
    return [pid for pid in tree.descendants(root) if psutil.Process(pid).name() != "group-witness"]
