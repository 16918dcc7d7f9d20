"""Run many commands under oomguard from one process: no process, descriptor, thread or folder may
be left. 1,000 by default.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from oomguard.supervisor import process
from oomguard.supervisor.output_buffer import OutputBuffer
from oomguard.supervisor.signals import SignalForwarder
from oomguard.supervisor.streams import StandardInput
from oomguard.supervisor.tree import become_subreaper
from support.figure import conclude
from support.supervising import wait_for

SCRIPT = Path(__file__)
# Leaves an orphan in a session of its own, and a zombie.
COMMAND = ("sh", "-c", "setsid sleep 3600 >/dev/null 2>&1 & true & exit 3")


def children() -> int:
    """Count the processes below this one, zombies too."""
    return len(psutil.Process().children(recursive=True))


def descriptors() -> int:
    """Count the open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def folders() -> int:
    """Count our folders in the temporary folder."""
    return len(list(Path(tempfile.gettempdir()).glob("oomguard-*")))


def main() -> None:
    """Run them and count."""
    if len(sys.argv) > 1:
        count = int(sys.argv[1])
    else:
        count = 1000
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        left = measured(count)
    told = ", ".join(f"{number} {kind}" for kind, number in left.items())
    conclude(f"left by {count} runs: {told} (goal: none)", met=not any(left.values()))


def measured(count: int) -> dict[str, int]:
    """Run so many and return what is there that was not before."""
    become_subreaper()
    process.SPARE_S = (
        0.0  # each orphan would be given its seconds, and a thousand of them take an hour
    )
    before = (children(), descriptors(), threading.active_count(), folders())
    began = time.perf_counter()
    for number in range(count):
        buffer = OutputBuffer()
        with SignalForwarder() as signals:
            ended = process.run_once(process.Command(COMMAND, {}), buffer, signals, StandardInput())
        buffer.close()
        assert ended.status == 3, ended
        if number == 0:  # what is loaded once is open from here on
            before = (before[0], descriptors(), *before[2:])
    took_s = time.perf_counter() - began
    wait_for(
        lambda: threading.active_count() <= before[2], limit_s=5
    )  # a last look at open files may be under way
    now = (children(), descriptors(), threading.active_count(), folders())
    kinds = ("processes", "descriptors", "threads", "folders")
    print(f"{count} runs, {took_s / count * 1000:.0f} ms each", file=sys.stderr)
    return {kind: after - was for kind, was, after in zip(kinds, before, now, strict=True)}


if __name__ == "__main__":
    main()
