"""All inputs of a command, read by whoever pays: this process, several here, or a cluster; their
outcomes in the order of the inputs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Final

from oomguard._version import __version__
from oomguard.cli.render import InputRenderer, OnePage, RenderedInput, RenderOptions
from oomguard.core import safe_python
from oomguard.core.errors import InputError, UsageError
from oomguard.scan.inputs import Input, is_url
from oomguard.scan.source import printable_path

# Inputs in parallel over processes: results in the order of the inputs, a dead worker costs its own
# input only.

# Finished results that wait for an earlier input are kept: this many at most.
AHEAD: Final = 256
TELL_S: Final = 0.1
# A worker takes as long to start as this many bytes of plain text take to read, and packed bytes
# are more work.
START_BYTES: Final = 64 << 20
_WORK_PER_BYTE: Final = {".zst": 8, ".gz": 24, ".xz": 48, ".bz2": 96}


def usable_cpus() -> int:
    """The CPUs that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def automatic_jobs(sizes: Mapping[str, int]) -> int:
    """How many processes pay for inputs of these sizes in bytes: as many as there are CPUs, or only
    this one.
    """
    work = sum(size * _WORK_PER_BYTE.get(Path(path).suffix, 1) for path, size in sizes.items())
    return max(1, min(usable_cpus(), len(sizes), work // START_BYTES))


def is_portable(path: str) -> bool:
    """Whether another process reads the same bytes there: a regular file, an object elsewhere, no
    name for a descriptor of our own.
    """
    if is_url(path):
        return True
    # no links
    return Path(path).is_file() and not os.path.abspath(path).startswith(("/dev/", "/proc/"))  # noqa: PTH100


def in_parallel(
    work: RenderOptions,
    paths: Sequence[str],
    jobs: int,
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    """The outcome of every path, in their order, each as soon as those before it are there.

    ``own`` reads what only this process can read (standard input). Closing the iterator ends the
    workers at once.
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

    def __init__(
        self, work: RenderOptions, jobs: int, on_read: Callable[[int], None] | None
    ) -> None:
        self._work = work
        self._jobs = jobs
        self._on_read = on_read
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def give(self, index: int, path: str) -> bool:
        """Hand an input to a worker; False where all are busy."""
        while self._idle or len(self._busy) < self._jobs:
            idle = bool(self._idle)
            if idle:
                worker = self._idle.pop()
            else:
                worker = self._start()
            try:
                worker.pipe.send(path)
            except OSError:
                if idle:  # it died while it had nothing to do: another one takes the input
                    self._bury(worker)
                    continue
            worker.index = index
            worker.path = path
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
                yield (
                    worker.index,
                    RenderedInput(error=f"{printable_path(worker.path)}: {self._bury(worker)}"),
                )
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
        # No multiprocessing.Process: it starts Pythons that look for modules in the working
        # directory first.
        ours, theirs = Pipe()
        command = [*safe_python.command("oomguard.cli.read_inputs"), str(theirs.fileno())]
        # Born deaf to Ctrl-C, which reaches the whole group: this process ends them.
        main = threading.current_thread() is threading.main_thread()
        if main:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            before = None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=safe_python.environment(),
            )
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            theirs.close()
        with contextlib.suppress(
            OSError
        ):  # it has ended already, which is told with its first input
            ours.send((self._work, self._on_read is not None))
        return _Worker(process, ours)

    @staticmethod
    def _bury(worker: _Worker) -> str:
        """Reap a worker that has ended; how it ended."""
        status = worker.process.wait()
        worker.pipe.close()
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return f"the process that read it {how}"


def main() -> None:
    """A worker: diagnose what comes through the pipe, whose descriptor is the argument, until it
    closes.
    """
    pipe = Connection(int(sys.argv[1]))
    try:
        work, tell = pipe.recv()
    except EOFError:
        return
    renderer = InputRenderer(work)
    untold_bytes = 0
    told_s = time.monotonic()

    def on_read(size_bytes: int) -> None:
        nonlocal untold_bytes, told_s
        untold_bytes += size_bytes
        if time.monotonic() - told_s >= TELL_S:
            pipe.send(untold_bytes)
            untold_bytes = 0
            told_s = time.monotonic()

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


# The bar on a terminal while inputs are read: by bytes, on standard error, gone when it is done.

BIG_BYTES: Final = 64 << 20
# Taking the bar off the screen and drawing it again costs a millisecond: not for each of thousands
# of lines.
PRINT_S: Final = 0.1


class ReadingProgress:
    """A bar over ``total_bytes`` of ``files`` inputs, shown on a terminal when reading takes a
    while.

    ``write`` prints a text; where the bar is on the same screen, it makes way.
    """

    def __init__(self, files: int, total_bytes: int, write: Callable[[str], None]) -> None:
        self.shown = (
            sys.stderr is not None
            and sys.stderr.isatty()
            and (files > 1 or total_bytes > BIG_BYTES)
        )
        self._files = files
        self._done = 0
        self._write = write
        self._same_screen = self.shown and sys.stdout is not None and sys.stdout.isatty()
        self._kept: list[str] = []
        self._printed_s = time.monotonic()
        if self.shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task(self._words(), total=total_bytes or None)

    def __enter__(self) -> ReadingProgress:
        if self.shown:
            self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.shown:
            self._progress.stop()
            if kind is None:
                self._write("".join(self._kept))

    def read(self, size_bytes: int) -> None:
        """Note that so many more bytes have been read."""
        if self.shown:
            self._progress.advance(self._task, size_bytes)
            self._print_kept()

    def finish(self, text: str) -> None:
        """Note that one more input is done, and print its text."""
        self._done += 1
        if self.shown:
            self._progress.update(self._task, description=self._words())
        if self._same_screen:
            self._kept.append(text)
            self._print_kept()
        else:
            self._write(text)

    def _print_kept(self) -> None:
        """Take the bar off the screen while something else is printed there."""
        if not any(self._kept) or time.monotonic() - self._printed_s < PRINT_S:
            return
        self._progress.stop()
        self._write("".join(self._kept))
        self._kept.clear()
        self._progress.start()
        self._printed_s = time.monotonic()

    def _words(self) -> str:
        if self._files > 1:
            return f"{self._done} of {self._files} inputs"
        return "reading"


# Inputs over a Ray cluster: the same results as here, in the same order; what a node cannot read as
# it lies here is read here.

# A batch is so many bytes of logs, or fewer: each CPU gets several of them, so that the last ones
# end together.
BATCH_BYTES: Final = 24 << 20
BATCH_INPUTS: Final = 128
_BATCHES_PER_CPU: Final = 8


@dataclass(frozen=True, slots=True)
class _Common:
    """What all batches share: the work, the folder that relative paths begin in, and the version
    that reads them.
    """

    work: RenderOptions
    folder: str
    version: str


def on_cluster(
    work: RenderOptions,
    inputs: Sequence[Input],
    jobs: int,
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    """Yield the outcome of every input, in their order.

    Args:
        work: what is asked for.
        inputs: the inputs.
        jobs: how many batches are worked on at the same time; 0: as many as the cluster has CPUs.
        own: reads what only this process can read, such as standard input.
        on_read: called with the bytes of each batch that is done.

    Raises:
        UsageError: the cluster cannot be joined, or its workers have no oomguard of this version.
    """
    from oomguard.engines.ray.cluster import cluster, cpus, in_order

    with cluster() as ray:
        at_once = jobs or cpus(ray)
        away = [one for one in inputs if one.size_bytes is not None]
        batches = _batches(away, at_once)
        common = _Common(replace(work, in_folders=frozenset()), _folder(), __version__)
        try:
            results = in_order(ray, read_batch, common, batches, at_once)
            with contextlib.closing(_singly(results, batches, own, on_read)) as outcomes:
                for one in inputs:
                    yield own(one.path) if one.size_bytes is None else next(outcomes)
        except ImportError as error:
            raise UsageError(
                f"the cluster's workers have no oomguard: {error}",
                hint=(
                    f"install oomguard {__version__} on every node, from the same wheel file or "
                    "clone"
                ),
            ) from None


def read_batch(common: _Common, batch: Sequence[Input]) -> list[RenderedInput | None]:
    """Diagnose the inputs of a batch, on a worker; None for one that does not lie on this node as
    it does where it was listed.

    Raises UsageError where this is another version of oomguard.
    """
    if common.version != __version__:
        raise UsageError(
            f"the cluster's workers have oomguard {__version__}, this process has {common.version}",
            hint=(
                f"install oomguard {common.version} on every node, from the same wheel file or "
                "clone"
            ),
        )
    with contextlib.suppress(
        OSError
    ):  # where there is no such folder no relative path is found either
        os.chdir(common.folder)
    renderer = _renderer(common.work)
    return [
        renderer.diagnose(one.path, is_named=one.is_named) if _is_the_same(one) else None
        for one in batch
    ]


@functools.lru_cache(maxsize=1)
def _renderer(work: RenderOptions) -> InputRenderer:
    return InputRenderer(work)


def _is_the_same(one: Input) -> bool:
    if is_url(one.path):
        return True
    try:
        about = Path(one.path).stat()
    except OSError:
        return False
    return about.st_size == one.size_bytes and about.st_mtime == one.modified_at


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed: no relative path can be read here either
        return "/"


def _batches(inputs: Sequence[Input], at_once: int) -> list[list[Input]]:
    total = sum(one.size_bytes or 0 for one in inputs)
    most_bytes = min(BATCH_BYTES, max(1, total // (_BATCHES_PER_CPU * at_once)))
    most = min(BATCH_INPUTS, max(1, len(inputs) // (_BATCHES_PER_CPU * at_once)))
    batches: list[list[Input]] = []
    size_bytes = 0
    for one in inputs:
        if (
            not batches
            or len(batches[-1]) >= most
            or size_bytes + (one.size_bytes or 0) > most_bytes
        ):
            batches.append([])
            size_bytes = 0
        batches[-1].append(one)
        size_bytes += one.size_bytes or 0
    return batches


def _singly(
    results: Generator[list[RenderedInput | str | None]],
    batches: Sequence[Sequence[Input]],
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    with contextlib.closing(results):
        for batch, outcomes in zip(batches, results, strict=True):
            if on_read is not None:
                on_read(sum(one.size_bytes or 0 for one in batch))
            for one, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, str):
                    yield RenderedInput(error=f"{printable_path(one.path)}: {outcome}")
                elif outcome is None or (
                    outcome.error and not outcome.text and not outcome.findings
                ):
                    yield own(
                        one.path
                        # whatever stood in the way there: here it is read, or told, as without a
                        # cluster
                    )
                else:
                    yield outcome


def read_all(
    inputs: Sequence[Input],
    work: RenderOptions,
    jobs: int,
    on: str,
    write: Callable[[str], None],
    errors: list[InputError],
) -> bool:
    """Diagnose every input and write what comes out, in their order; return whether an
    out-of-memory was found.

    Args:
        inputs: the inputs.
        work: what is asked for.
        jobs: how many processes read; 0: as many as pay.
        on: ``local``, or ``ray`` for a cluster.
        write: receives each text.
        errors: an error for each input that cannot be read is added.
    """
    page = OnePage()
    found = False
    with reading(inputs, work, jobs, on, write) as (outcomes, finish):
        for outcome in outcomes:
            finish(page.add(outcome.text) if work.form == "html" and outcome.text else outcome.text)
            found = found or outcome.found
            if outcome.error:
                errors.append(InputError(outcome.error, hint=outcome.hint))
    write(page.end())
    return found


@contextlib.contextmanager
def reading(
    inputs: Sequence[Input], work: RenderOptions, jobs: int, on: str, write: Callable[[str], None]
) -> Iterator[tuple[Iterator[RenderedInput], Callable[[str], None]]]:
    """Yield the outcomes of all inputs, and what takes the text of each once it is done; the
    arguments are those of ``read_all``.
    """
    renderer = InputRenderer(work)
    names = [one.path for one in inputs]
    sizes = {one.path: one.size_bytes for one in inputs if one.size_bytes is not None}
    with ReadingProgress(len(inputs), sum(sizes.get(name, 0) for name in names), write) as progress:
        if progress.shown:
            on_read = progress.read
        else:
            on_read = None

        def own(path: str) -> RenderedInput:
            return renderer.diagnose(path, on_read)

        outcomes: Generator[RenderedInput]
        if on == "ray":
            outcomes = on_cluster(work, inputs, jobs, own, on_read)
        elif len(inputs) > 1:
            jobs = min(jobs or automatic_jobs(sizes), len(inputs))
            if jobs > 1:
                outcomes = in_parallel(work, names, jobs, own, on_read)
            else:
                outcomes = (own(name) for name in names)
        else:
            outcomes = (own(name) for name in names)
        with contextlib.closing(outcomes):
            yield outcomes, progress.finish
