"""Run many commands under oomguard from one process: no process, descriptor, thread or folder may be left. 1,000 by default."""

import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from oomguard.cli.run import configure_log
from oomguard.engines.command import Launch
from oomguard.remedy.policy import Policy
from oomguard.rules.load import load_rules
from oomguard.supervise.process import become_subreaper
from oomguard.supervise.relaunch import Supervision
from oomguard.supervise.signals import Signals

SCRIPT = Path(__file__)
# Leaves an orphan in a session of its own, and a zombie.
COMMAND = ("sh", "-c", "setsid sleep 3600 & true & exit 3")


def children() -> int:
    """Count the processes below this one, zombies too."""
    return len(psutil.Process().children(recursive=True))


def descriptors() -> int:
    """Count the open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    """Run them and count."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    configure_log("console", quiet=True, verbose=False)
    become_subreaper()
    rules = load_rules()
    before = (children(), 0, threading.active_count(), 0)
    began = time.perf_counter()
    for number in range(count):
        with Signals() as signals:
            outcome = Supervision(Launch(COMMAND), Policy(), rules).run(signals)
        assert outcome.status == 3, outcome
        if number == 0:
            before = (children(), descriptors(), threading.active_count(), 0)
    took_s = time.perf_counter() - began
    folders = len(list(Path(tempfile.gettempdir()).glob("oomguard-*")))
    now = (children(), descriptors(), threading.active_count(), folders)
    kinds = ("processes", "descriptors", "threads", "folders")
    left = [after - was for was, after in zip(before, now, strict=True)]
    print(f"{count} runs, {took_s / count * 1000:.0f} ms each", file=sys.stderr)
    print("left: " + ", ".join(f"{n} {kind}" for n, kind in zip(left, kinds, strict=True)), flush=True)
    sys.exit(1 if any(left) else 0)


if __name__ == "__main__":
    main()
