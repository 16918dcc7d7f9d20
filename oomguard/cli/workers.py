"""Inputs in parallel over processes: results in the order of the inputs, a dead worker costs its own input only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Final

from oomguard import clean_start
from oomguard.cli.rendering import InputRenderer, RenderedInput, Work
from oomguard.fleet.inputs import is_url
from oomguard.observe.source import shown

# Finished results that wait for an earlier input are kept: this many at most.
AHEAD: Final = 256
TELL_S: Final = 0.1
# A worker takes as long to start as this many bytes of plain text take to read, and packed bytes are more work.
START_BYTES: Final = 64 << 20
_WORK_PER_BYTE: Final = {".zst": 8, ".gz": 24, ".xz": 48, ".bz2": 96}


def usable_cpus() -> int:
    """The CPUs that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def automatic_jobs(sizes: Mapping[str, int]) -> int:
    """How many processes pay for inputs of these sizes in bytes: as many as there are CPUs, or only this one."""
    work = sum(size * _WORK_PER_BYTE.get(Path(path).suffix, 1) for path, size in sizes.items())
    return max(1, min(usable_cpus(), len(sizes), work // START_BYTES))


def is_portable(path: str) -> bool:
    """Whether another process reads the same bytes there: a regular file, an object elsewhere, no name for a descriptor of our own."""
    if is_url(path):
        return True
    return Path(path).is_file() and not os.path.abspath(path).startswith(("/dev/", "/proc/"))  # noqa: PTH100 - no links


def in_parallel(
    work: Work,
    paths: Sequence[str],
    jobs: int,
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    """The outcome of every path, in their order, each as soon as those before it are there.

    ``own`` reads what only this process can read (standard input). Closing the iterator ends the workers at once.
    """
    portable = [is_portable(path) for path in paths]
    to_do = deque(i for i in range(len(paths)) if portable[i])
    done: dict[int, RenderedInput] = {}
    pool = _Pool(work, min(jobs, len(to_do)), on_read)
    try:
        for turn, path in enumerate(paths):
            while True:
                while to_do and to_do[0] < turn + AHEAD and pool.give(to_do[0], paths[to_do[0]]):
                    to_do.popleft()
                if turn in done or not portable[turn]:
                    break
                done.update(pool.take())
            yield done.pop(turn) if portable[turn] else own(path)
    finally:
        pool.end()


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    index: int = -1
    path: str = ""


class _Pool:
    """Up to ``jobs`` workers, started when there is something for them to do."""

    def __init__(self, work: Work, jobs: int, on_read: Callable[[int], None] | None) -> None:
        self._work, self._jobs, self._on_read = work, jobs, on_read
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def give(self, index: int, path: str) -> bool:
        """Hand an input to a worker; False where all are busy."""
        while self._idle or len(self._busy) < self._jobs:
            idle = bool(self._idle)
            worker = self._idle.pop() if idle else self._start()
            try:
                worker.pipe.send(path)
            except OSError:
                if idle:  # it died while it had nothing to do: another one takes the input
                    self._bury(worker)
                    continue
            worker.index, worker.path = index, path
            self._busy.append(worker)
            return True
        return False

    def take(self) -> Iterator[tuple[int, RenderedInput]]:
        """Wait for the busy workers; yield what is finished, which may be nothing yet."""
        for pipe in wait([worker.pipe for worker in self._busy]):
            worker = next(w for w in self._busy if w.pipe is pipe)
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                self._busy.remove(worker)
                yield worker.index, RenderedInput(error=f"{shown(worker.path)}: {self._bury(worker)}")
                continue
            if isinstance(answer, RenderedInput):
                self._busy.remove(worker)
                self._idle.append(worker)
                yield worker.index, answer
            elif self._on_read is not None:
                self._on_read(answer)

    def end(self) -> None:
        """End every worker at once: they only read."""
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            self._bury(worker)

    def _start(self) -> _Worker:
        # No multiprocessing.Process: it starts Pythons that look for modules in the working directory first.
        ours, theirs = Pipe()
        command = [*clean_start.command("oomguard.cli.workers"), str(theirs.fileno())]
        # Born deaf to Ctrl-C, which reaches the whole group: this process ends them.
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=clean_start.environment()
            )
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            theirs.close()
        with contextlib.suppress(OSError):  # it has ended already, which is told with its first input
            ours.send((self._work, self._on_read is not None))
        return _Worker(process, ours)

    @staticmethod
    def _bury(worker: _Worker) -> str:
        """Reap a worker that has ended; how it ended."""
        status = worker.process.wait()
        worker.pipe.close()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the process that read it {how}"


def main() -> None:
    """A worker: diagnose what comes through the pipe, whose descriptor is the argument, until it closes."""
    pipe = Connection(int(sys.argv[1]))
    try:
        work, tell = pipe.recv()
    except EOFError:
        return
    renderer = InputRenderer(work)
    untold_bytes, told_s = 0, time.monotonic()

    def on_read(size_bytes: int) -> None:
        nonlocal untold_bytes, told_s
        untold_bytes += size_bytes
        if time.monotonic() - told_s >= TELL_S:
            pipe.send(untold_bytes)
            untold_bytes, told_s = 0, time.monotonic()

    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        outcome = renderer.diagnose(path, on_read if tell else None)
        if tell:
            pipe.send(untold_bytes)
            untold_bytes = 0
        pipe.send(outcome)
