"""Read all inputs of a command: in this process, in several processes, or on a Ray cluster.

The outcomes have the order of the inputs. A worker that dies costs only its own input.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from oomguard.cli.options import read_policy, read_rules
from oomguard.core.errors import InputError, UsageError
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.installation import __version__, extension
from oomguard.core.settings import parse_assignment
from oomguard.scan.inputs import Input, is_url
from oomguard.scan.source import damage_of, open_log, open_standard_input, printable_path

if TYPE_CHECKING:
    import subprocess
    from multiprocessing.connection import Connection

    from rich.console import Console


# Turn one input into finished text, in this process or in a worker with the same result.

_MAIN: Final = re.compile(r"<main[^>]*>\n?(.*)</main>", re.DOTALL)


class Screen(NamedTuple):
    """Describe a screen in plain values, because a worker has no terminal of its own."""

    width: int
    terminal: bool
    colors: str | None
    no_color: bool
    encoding: str

    @classmethod
    def of(cls, console: Console) -> Screen:
        """Return the screen of a console."""
        return cls(
            console.width,
            console.is_terminal,
            console.color_system,
            console.no_color,
            console.encoding,
        )

    def console(self, file: io.StringIO) -> Console:
        """Return a console with the same look that writes to ``file``."""
        from rich.console import Console

        return Console(
            file=file,
            width=self.width,
            force_terminal=self.terminal,
            color_system=self.colors,  # type: ignore[arg-type]
            no_color=self.no_color,
            highlight=False,
            legacy_windows=False,
            force_jupyter=False,
        )


class _Text(io.StringIO):
    """Hold text in memory, and name the encoding for writing it."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


class RenderOptions(NamedTuple):
    """Hold the options of the command line as plain values for any process.

    Attributes:
        in_folders: inputs that oomguard found in a folder, so that the user did not name them.
        summary: whether the result is plain incidents for a summary instead of text.
    """

    form: str
    screen: Screen | None = None
    allow: str | None = None
    pinned: tuple[str, ...] = ()
    floors: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    gpu_memory: str | None = None
    given: tuple[str, ...] = ()
    model: str | None = None
    masked: bool = True
    quiet: bool = False
    verbose: bool = False
    in_folders: frozenset[str] = frozenset()
    summary: bool = False


class RenderedInput(NamedTuple):
    """Hold one rendered input: text or summary data, the verdict, and read errors."""

    text: str = ""
    found: bool = False
    error: str = ""
    hint: str | None = None
    findings: tuple[Any, ...] = ()


class InputRenderer:
    """Render inputs with fixed options; policy, rules and given facts are read once.

    Raises:
        SettingError: if a setting, a size or a policy is invalid.
        RuleError: if a rule file cannot be used.
        InputError: if a model cannot be found.
    """

    def __init__(self, work: RenderOptions) -> None:
        self.work = work
        from oomguard.diagnosis import device_fact, user_settings

        self.policy = read_policy(work.allow, work.pinned, work.floors)
        self.rules = read_rules(work.rules)
        self.facts = device_fact(work.gpu_memory)
        self.settings = user_settings(dict(map(parse_assignment, work.given)))
        if work.model is not None:
            from oomguard.estimate.model.files import find_model

            # Raises now, not once for every log.
            find_model(work.model)

    def diagnose(
        self,
        path: str,
        on_read: Callable[[int], None] | None = None,
        *,
        is_named: bool | None = None,
    ) -> RenderedInput:
        """Diagnose one input and render it; errors of the input are in the result.

        Args:
            path: the input.
            on_read: receives the number of bytes of each read; None for no progress.
            is_named: whether the user named the input; None to look it up in the options.
        """
        from oomguard.diagnosis import PASSED_OVER, diagnose_stream

        try:
            with contextlib.closing(_opened(path, on_read)) as stream:
                diagnosis = diagnose_stream(
                    stream,
                    path,
                    rules=self.rules,
                    policy=self.policy,
                    given=self.facts,
                    settings=self.settings,
                    model=self.work.model,
                    is_named=path not in self.work.in_folders if is_named is None else is_named,
                )
                damage = damage_of(stream)
            if self.work.summary:
                return RenderedInput(
                    found=diagnosis.verdict == "oom",
                    error="" if damage is None else f"{printable_path(path)}: {damage}",
                    findings=_findings(diagnosis),
                )
            is_shown = (
                self.work.form == "json" or self.work.verbose or PASSED_OVER not in diagnosis.notes
            )
            if damage is not None and self.work.form != "json":
                # oomguard did not see all of it, so it cannot say that there is no failure
                is_shown = is_shown and bool(diagnosis.incidents)
            if is_shown:
                text = self.render(diagnosis)
            else:
                text = ""
        except InputError as error:
            return RenderedInput(error=str(error), hint=error.hint)
        except OSError as error:
            return RenderedInput(error=f"{printable_path(path)}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001
            # One failing input must not stop the others.
            import traceback

            if self.work.verbose:
                trace = traceback.format_exc()
            else:
                trace = "run it with --verbose to see where"
            return RenderedInput(
                error=f"{printable_path(path)}: internal error: {type(error).__name__}: {error}",
                hint=trace,
            )
        return RenderedInput(
            text,
            diagnosis.verdict == "oom",
            "" if damage is None else f"{printable_path(path)}: {damage}",
        )

    def render(self, diagnosis: Diagnosis) -> str:
        """Return the diagnosis in the chosen format; "" for a clean input under --quiet.

        JSON has an object for a clean input too.
        """
        if self.work.quiet and self.work.form != "json" and not diagnosis.incidents:
            return ""
        with unmasked_if(not self.work.masked):
            return self._render(diagnosis)

    def _render(self, diagnosis: Diagnosis) -> str:
        if self.work.form == "json":
            from oomguard.report.json import to_json

            return to_json(diagnosis) + "\n"
        if self.work.form == "md":
            from oomguard.report.markdown import to_markdown

            return to_markdown(diagnosis) + "\n"
        if self.work.form == "html":
            from oomguard.report.html import to_html

            return to_html(diagnosis)
        screen = self.work.screen or Screen(
            80, terminal=False, colors=None, no_color=True, encoding="utf-8"
        )
        return text_of(screen, lambda console: self._print(console, diagnosis))

    def _print(self, console: Console, diagnosis: Diagnosis) -> None:
        from oomguard.report.panel import print_diagnosis

        print_diagnosis(console, diagnosis, full=self.work.verbose)
        if self.work.verbose:
            for incident in diagnosis.incidents:
                for line in details(incident):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)


def text_of(screen: Screen, show: Callable[[Console], None]) -> str:
    """Return what ``show`` prints on a console of that screen."""
    file = _Text(screen.encoding)
    show(screen.console(file))
    return file.getvalue()


def _opened(path: str, on_read: Callable[[int], None] | None) -> IO[bytes]:
    if path == "-":
        return open_standard_input(on_read)
    if "://" in path:
        from oomguard.scan.inputs import is_url

        if is_url(path):
            from oomguard.scan.inputs import open_object

            return open_object(path, on_read)
    return open_log(path, on_read)


def _findings(diagnosis: Diagnosis) -> tuple[Any, ...]:
    """Return what a summary needs of one input."""
    fleet = extension("fleet_summary")
    if fleet is None or not diagnosis.incidents:
        return ()
    found: tuple[Any, ...] = fleet.findings_in(diagnosis)
    return found


def unmasked_if(is_unmasked: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context that shows secrets, prompts and home folders if ``is_unmasked``."""
    if not is_unmasked:
        return contextlib.nullcontext()
    from oomguard.core.redact import unmasked

    return unmasked()


def details(incident: Incident) -> Iterator[str]:
    """Yield the effective settings and the facts of an incident with their sources."""
    from oomguard.core.redact import mask

    if incident.settings:
        yield (
            "effective settings:"
            if incident.settings_complete
            else "effective settings, as far as they are known:"
        )
    for name, setting in sorted(incident.settings.items()):
        whose = {True: ", set by the user", False: ", a default", None: ""}[setting.set_by_user]
        yield f"  {mask(f'{name} = {setting.value}')} ({setting.source}{whose})"
    if incident.facts:
        yield "facts:"
    for name, fact in sorted(incident.facts.items()):
        if fact.line is None:
            line = ""
        else:
            line = f", line {fact.line}"
        yield f"  {mask(f'{name} = {fact.value}')} ({fact.source}{line})"


class OnePage:
    """Join HTML pages into one: the first page's head, style and script, all contents."""

    def __init__(self) -> None:
        self._end = ""

    def add(self, page: str) -> str:
        """Return the text to write for one more page."""
        main = _MAIN.search(page)
        if main is None:
            return page
        if self._end:
            return main[1]
        self._end = page[main.end(1) :]
        return page[: main.end(1)]

    def end(self) -> str:
        """Return the text to write at the end; "" if there was no page."""
        return self._end


# The most finished results that wait for an earlier input.
AHEAD: Final = 256
# A bar that is drawn more often slows a fast disk down.
PROGRESS_S: Final = 0.1
# Starting a worker takes as long as reading this many bytes of plain text. Compressed bytes are
# more work.
START_BYTES: Final = 64 << 20
# A compressed byte becomes several bytes of text, and a slow format costs most.
_WORK_PER_BYTE: Final = {".zst": 8, ".gz": 24, ".xz": 48, ".bz2": 96}


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        # macOS has no such function.
        return os.cpu_count() or 1


def automatic_jobs(sizes: Mapping[str, int]) -> int:
    """Return how many processes are worth starting for inputs of these sizes in bytes."""
    work = sum(size * _WORK_PER_BYTE.get(Path(path).suffix, 1) for path, size in sizes.items())
    return max(1, min(usable_cpus(), len(sizes), work // START_BYTES))


def is_portable(path: str) -> bool:
    """Return whether another process would read the same bytes from a path.

    That is true for a regular file and a remote object, but not for a name of our own descriptor.
    """
    if is_url(path):
        return True
    # without following links
    return Path(path).is_file() and not os.path.abspath(path).startswith(("/dev/", "/proc/"))  # noqa: PTH100


def in_parallel(
    work: RenderOptions,
    paths: Sequence[str],
    jobs: int,
    own: Callable[[str], RenderedInput],
    on_read: Callable[[int], None] | None,
) -> Generator[RenderedInput]:
    """Yield the outcome of every path in order, each as early as possible.

    Closing the iterator stops the workers at once.

    Args:
        work: the options of the command.
        paths: the inputs.
        jobs: the number of workers.
        own: reads an input that only this process can read, such as standard input.
        on_read: receives the number of bytes read; None for no progress.
    """
    portable = list(map(is_portable, paths))
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
    """Manage up to ``jobs`` workers, each started when there is work for it."""

    def __init__(
        self, work: RenderOptions, jobs: int, on_read: Callable[[int], None] | None
    ) -> None:
        self._work = work
        self._jobs = jobs
        self._on_read = on_read
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []

    def give(self, index: int, path: str) -> bool:
        """Give an input to a worker; return False if all workers are busy."""
        while self._idle or len(self._busy) < self._jobs:
            idle = bool(self._idle)
            if idle:
                worker = self._idle.pop()
            else:
                worker = self._start()
            try:
                worker.pipe.send(path)
            except OSError:
                # The worker died while it was idle, so another one takes the input.
                if idle:
                    self._reap(worker)
                    continue
            worker.index = index
            worker.path = path
            self._busy.append(worker)
            return True
        return False

    def take(self) -> Iterator[tuple[int, RenderedInput]]:
        """Wait for the busy workers; yield finished results, possibly none yet."""
        from multiprocessing.connection import wait

        for pipe in wait([worker.pipe for worker in self._busy]):
            worker = next(w for w in self._busy if w.pipe is pipe)
            try:
                answer = worker.pipe.recv()
            except (EOFError, OSError):
                # The worker died, for example because the kernel killed it. Its input gets a
                # message, and the others continue.
                self._busy.remove(worker)
                yield (
                    worker.index,
                    RenderedInput(error=f"{printable_path(worker.path)}: {self._reap(worker)}"),
                )
                continue
            if isinstance(answer, RenderedInput):
                self._busy.remove(worker)
                self._idle.append(worker)
                yield worker.index, answer
            elif self._on_read is not None:
                self._on_read(answer)

    def end(self) -> None:
        """Stop every worker at once; workers only read, so nothing is lost."""
        workers = [*self._idle, *self._busy]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            self._reap(worker)

    def _start(self) -> _Worker:
        import signal
        import subprocess
        from multiprocessing.connection import Pipe

        from oomguard.core.process import python_command, python_environment

        # Not multiprocessing.Process, because its Pythons search the working directory for modules
        # first.
        ours, theirs = Pipe()
        command = [*python_command("oomguard.cli.inputs"), str(theirs.fileno())]
        # The worker ignores Ctrl-C, which reaches the whole group; this process stops it.
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
                env=python_environment(),
            )
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            theirs.close()
        # If the worker has ended already, its first input reports that.
        with contextlib.suppress(OSError):
            ours.send((self._work, self._on_read is not None))
        return _Worker(process, ours)

    @staticmethod
    def _reap(worker: _Worker) -> str:
        """Reap a worker that has ended; return how it ended."""
        status = worker.process.wait()
        worker.pipe.close()
        if status < 0:
            import signal

            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        return f"the process that read it {how}"


def main() -> None:
    """Run a worker: diagnose the paths that arrive on the pipe until it closes.

    The argument of the process is the pipe's descriptor.
    """
    from multiprocessing.connection import Connection

    pipe = Connection(int(sys.argv[1]))
    try:
        work, wants_progress = pipe.recv()
    except EOFError:
        return
    renderer = InputRenderer(work)
    unreported_bytes = 0
    reported_s = time.monotonic()

    def on_read(size_bytes: int) -> None:
        nonlocal unreported_bytes, reported_s
        unreported_bytes += size_bytes
        if time.monotonic() - reported_s >= PROGRESS_S:
            pipe.send(unreported_bytes)
            unreported_bytes = 0
            reported_s = time.monotonic()

    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        outcome = renderer.diagnose(path, on_read if wants_progress else None)
        if wants_progress:
            pipe.send(unreported_bytes)
            unreported_bytes = 0
        pipe.send(outcome)


# Smaller inputs are read before a bar would be useful.
BIG_BYTES: Final = 64 << 20
# Removing and redrawing the bar costs a millisecond, too much for each of thousands of lines.
PRINT_S: Final = 0.1


# A panel begins so, after the escapes of colors. A blank line separates it from other texts.
_PANEL: Final = re.compile(r"(?:\x1b\[[\d;]*m)*oomguard(?:\[|: \d+ failures)")


class ReadingProgress:
    """Show a progress bar over ``total_bytes`` of ``files`` inputs on a terminal.

    ``write`` prints a text. If the bar is on the same screen, the bar is removed for it.
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
        self._pending: list[str] = []
        # whether the last text was a panel; None before the first text
        self._was_panel: bool | None = None
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
                self._write("".join(self._pending))

    def read(self, size_bytes: int) -> None:
        """Record that ``size_bytes`` more bytes were read."""
        if self.shown:
            self._progress.advance(self._task, size_bytes)
            self._print_pending()

    def finish(self, text: str) -> None:
        """Record that one more input is done, and print its text."""
        self._done += 1
        if self.shown:
            self._progress.update(self._task, description=self._words())
        is_panel = _PANEL.match(text) is not None
        if text and self._was_panel is not None and (is_panel or self._was_panel):
            text = f"\n{text}"
        if text:
            self._was_panel = is_panel
        if self._same_screen:
            self._pending.append(text)
            self._print_pending()
        else:
            self._write(text)

    def _print_pending(self) -> None:
        """Print the waiting texts, and remove the bar meanwhile."""
        if not any(self._pending) or time.monotonic() - self._printed_s < PRINT_S:
            return
        self._progress.stop()
        self._write("".join(self._pending))
        self._pending.clear()
        self._progress.start()
        self._printed_s = time.monotonic()

    def _words(self) -> str:
        if self._files > 1:
            return f"{self._done} of {self._files} inputs"
        return "reading"


# A Ray cluster gives the same results in the same order. This process reads an input itself if a
# node does not have the same file.

# Limits of a batch. Each CPU gets several batches, so that all CPUs end at about the same time.
BATCH_BYTES: Final = 24 << 20
# The overhead of a task on the cluster then stays small for small files.
BATCH_INPUTS: Final = 128
# Several batches for each CPU even out inputs of different cost.
_BATCHES_PER_CPU: Final = 8


class _Common(NamedTuple):
    """Hold what all batches share: options, the working directory and oomguard's version."""

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
    """Yield the outcome of every input, in order.

    Args:
        work: the options of the command.
        inputs: the inputs.
        jobs: the number of concurrent batches; 0 for the cluster's CPUs.
        own: reads an input that only this process can read, such as standard input.
        on_read: receives the bytes of each finished batch; None for no progress.

    Raises:
        UsageError: if the cluster cannot be joined, or its workers have another oomguard version.
    """
    from oomguard.engines.ray.cluster import cluster, cpus, in_order

    with cluster() as ray:
        at_once = jobs or cpus(ray)
        away = []
        for one in inputs:
            if one.size_bytes is not None:
                away.append(one)
        batches = _batches(away, at_once)
        common = _Common(work._replace(in_folders=frozenset()), _folder(), __version__)
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
    """Diagnose the inputs of a batch on a worker.

    None stands for an input that differs on this node from where it was listed.

    Raises:
        UsageError: if the worker has another version of oomguard.
    """
    if common.version != __version__:
        raise UsageError(
            f"the cluster's workers have oomguard {__version__}, this process has {common.version}",
            hint=(
                f"install oomguard {common.version} on every node, from the same wheel file or "
                "clone"
            ),
        )
    # Without the folder, no relative path is found either.
    with contextlib.suppress(OSError):
        os.chdir(common.folder)
    renderer = _renderer(common.work)
    outcomes: list[RenderedInput | None] = []
    for one in batch:
        if _is_the_same(one):
            outcomes.append(renderer.diagnose(one.path, is_named=one.is_named))
        else:
            outcomes.append(None)
    return outcomes


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
    except OSError:
        # The working directory is gone, so no relative path can be read either.
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
                        # whatever failed there, this process reads the input or reports the error
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
    """Diagnose every input and write the results in order.

    Args:
        inputs: the inputs.
        work: the options of the command.
        jobs: the number of reading processes; 0 for as many as are worthwhile.
        on: ``local``, or ``ray`` for a cluster.
        write: receives each text.
        errors: receives an error for each unreadable input.

    Returns:
        Whether an input shows an out-of-memory failure.
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
    """Yield the outcomes of all inputs, and a function that takes each finished text.

    The arguments are those of ``read_all``.
    """
    renderer = InputRenderer(work)
    names = [one.path for one in inputs]
    sizes = {}
    for one in inputs:
        if one.size_bytes is not None:
            sizes[one.path] = one.size_bytes
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
