"""Run ``oomguard diagnose``: read saved or growing logs, and write diagnoses."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

import click

from oomguard.cli.inputs import InputRenderer, RenderOptions, Screen
from oomguard.cli.options import (
    ADVANCED,
    FORMS,
    Assignment,
    Count,
    F,
    Form,
    GroupedCommand,
    Moment,
    SizeText,
    color_option,
    console,
    option,
    policy_options,
    report_configuration,
)
from oomguard.core.errors import InputError, UsageError
from oomguard.core.incident import Diagnosis, Incident
from oomguard.core.installation import extension, has_extension
from oomguard.scan.inputs import Input, find_inputs, is_url, read_once
from oomguard.scan.source import (
    HEAD_BYTES,
    Event,
    LineSplitter,
    LogChange,
    encoding_of,
    follow,
    follow_stream,
    format_of,
    open_log,
    printable_path,
    raw_standard_input,
)

# Where a command writes what it found: standard output, or a file that is cut back to what was
# written whole.


@contextlib.contextmanager
def sink(output: str | None, inputs: list[str], form: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes text at once to standard output or a file.

    After a failed write, the file is cut back to its last complete text.

    Raises:
        UsageError: if the file cannot be written.
    """
    to_file = output is not None and output != "-"
    if sys.stdout is not None:
        standard = sys.stdout.buffer
    else:
        standard = None
    stream = _opened(str(output), inputs) if to_file else standard
    # Text for other programs is UTF-8, whatever the terminal's encoding. Undecodable bytes of a
    # name become \udcNN, as in JSON.
    if to_file or form != "terminal" or sys.stdout is None:
        encoding = "utf-8"
    else:
        encoding = sys.stdout.encoding

    whole_bytes = 0

    def write(text: str) -> None:
        nonlocal whole_bytes
        if not text or stream is None:
            return
        left = memoryview(text.encode(encoding, "backslashreplace"))
        size_bytes = len(left)
        try:
            while left:
                left = left[stream.write(left) :]
            stream.flush()
        except OSError as error:
            if not to_file:
                raise
            # Half a page is useless.
            _cut_back(str(output), 0 if form == "html" else whole_bytes)
            reason = error.strerror or error
            raise UsageError(
                f"--output {printable_path(str(output))}: {reason}",
                hint="name a file on a disk with free space",
            ) from None
        whole_bytes += size_bytes

    try:
        yield write
    finally:
        if to_file and stream is not None:
            stream.close()


def _cut_back(output: str, size_bytes: int) -> None:
    """Cut a file back to its complete texts; remove the file if there are none."""
    # The disk is full, so removing the file may fail too; the first error is the one to show.
    with contextlib.suppress(OSError):
        if stat.S_ISREG(Path(output).stat().st_mode):
            os.truncate(output, size_bytes) if size_bytes else Path(output).unlink()


def _opened(output: str, inputs: list[str]) -> IO[bytes]:
    try:
        for path in inputs:
            if (
                path != "-"
                and Path(output).exists()
                and Path(path).exists()
                and Path(path).samefile(output)
            ):
                raise UsageError(
                    f"--output {printable_path(output)}: this file is one of the inputs",
                    hint="name another file",
                )
        # unbuffered: a failed write is not tried again at the end
        return Path(output).open("wb", buffering=0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--output {printable_path(output)}: {reason}",
            hint="name a file in a folder that exists",
        ) from None


# Only a diagnosis has an HTML page.
_FORMS: Final = (*FORMS, "html")
_FORM_BY_SUFFIX: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".md": "md",
    ".html": "html",
    ".htm": "html",
    **dict.fromkeys(("", ".txt", ".text", ".log", ".out"), "terminal"),
}


class _Jobs(Count):
    """Accept a number of processes; 0 means ``auto``."""

    name = "number of processes, or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return 0
        return int(super().convert(value, param, ctx))


LACKS: Final = "What the log does not show"


def _summary_option(function: F) -> F:
    """Add --summary, if the package that groups incidents is installed."""
    if not has_extension("fleet_summary"):
        return function
    return option(
        "--summary",
        is_flag=True,
        help="Group the failures of all inputs, and show the change that would fix most of them.",
    )(function)


@click.command(
    "diagnose",
    cls=GroupedCommand,
    common=("form", "output", "follow", "summary", "since", "exit_code"),
    example="oomguard diagnose error.log --format md",
    renamed={"--engine": "--on"},
)
@click.argument("paths", nargs=-1, metavar="[PATH …|-]")
@option(
    "--format",
    "form",
    type=Form(_FORMS),
    help="Output format of the diagnosis.",
    show_default="from the name of --output, otherwise terminal",
    example="json",
)
@option(
    "--output",
    metavar="FILE",
    help="Write the result to FILE.",
    show_default="standard output",
    example="diagnosis.md",
)
@option(
    "--follow",
    is_flag=True,
    help="Keep reading as the log grows, and report each failure once, until Ctrl-C.",
)
@_summary_option
@option(
    "--since",
    type=Moment(),
    metavar="AGE|DATE",
    help="Skip inputs older than this, such as 24h, 7d or 2026-11-20.",
    show_default="read all",
    example="24h",
)
@option(
    "--exit-code",
    is_flag=True,
    help="Exit with status 1 if an input shows an out-of-memory failure.",
)
@option(
    "--gpu-memory",
    type=SizeText(),
    metavar="SIZE",
    help="Total memory of the device, such as 24GiB.",
    group=LACKS,
    example="24GiB",
)
@option(
    "--set",
    "given",
    type=Assignment(),
    multiple=True,
    metavar="SETTING=VALUE",
    help="Effective value of a setting of the engine (repeatable).",
    group=LACKS,
    example="max_model_len=32768",
)
@option(
    "--model",
    metavar="MODEL",
    help="Model folder, config.json or hub name, from which oomguard computes sizes.",
    show_default="the folder that the log names",
    group=LACKS,
    example="Qwen/Qwen3-8B",
)
@policy_options
@option(
    "--jobs",
    type=_Jobs(0, 1024),
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Number of processes that read the inputs.",
    group=ADVANCED,
    example="4",
)
@option(
    "--on",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Read the inputs in local processes, or on the workers of a Ray cluster.",
    group=ADVANCED,
)
@option(
    "--no-mask",
    is_flag=True,
    help="Print secrets, prompts and home folders as they are in the log.",
)
@option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print failures only, and nothing for a clean input (except in JSON).",
)
@option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print every failure, cause and option in full, with all settings and facts.",
)
@color_option
@click.pass_context
def command(
    ctx: click.Context,
    paths: tuple[str, ...],
    form: str | None,
    output: str | None,
    gpu_memory: str | None,
    given: tuple[str, ...],
    model: str | None,
    follow: bool,
    jobs: int,
    on: str,
    since: float | None,
    exit_code: bool,
    allow: str | None,
    pinned: tuple[str, ...],
    floors: tuple[str, ...],
    rules: tuple[str, ...],
    no_mask: bool,
    quiet: bool,
    verbose: bool,
    color: str,
    summary: bool = False,
) -> int:
    """Explain why memory ran out: each failure with its numbers, its cause and what to do.

    PATH is a log, a memory snapshot of torch, a folder, a pattern, an s3:// or gs:// address, or -
    for standard input. In a folder, oomguard reads all files, and the logs in sub-folders. Any of
    them may be compressed.

    Exit status: 0 after success, or with --exit-code 1 if an input shows an out-of-memory failure.
    2 after a usage error, an unreadable or damaged input, or a full disk. oomguard skips an input
    that it cannot read, and reads all others.
    """
    from oomguard.cli.inputs import RenderOptions

    _report_configuration(ctx, quiet=quiet, verbose=verbose)
    if not paths:
        if sys.stdin is not None and sys.stdin.isatty():
            raise UsageError(
                "diagnose needs a log, a folder, or - for standard input",
                hint="for example: oomguard diagnose error.log",
            )
        paths = ("-",)
    form = form or _form_of(output)
    if follow:
        check_follow(paths, form, summary=summary, on=on)
    elif summary and form == "html":
        raise UsageError(
            "--summary cannot write HTML",
            hint="use terminal, json or md: oomguard diagnose --summary --format md",
        )
    inputs, errors, left_out = (
        ([Input(paths[0], is_named=True)], [], 0)
        if follow
        else _expand(paths, since, summary=summary, quiet=quiet)
    )
    names = [one.path for one in inputs]
    with sink(output, names, form) as write:
        if form == "terminal":
            screen = Screen.of(_console(output, color))
        else:
            screen = None
        work = RenderOptions(
            form,
            screen,
            allow,
            pinned,
            floors,
            rules,
            gpu_memory,
            given,
            model,
            masked=not no_mask,
            quiet=quiet,
            verbose=verbose,
            in_folders=_paths(inputs, is_named=False) - _paths(inputs, is_named=True),
            summary=summary,
        )
        if follow:
            found = _follow(paths[0], work, write)
        elif summary and (fleet := extension("fleet_summary")) is not None:
            found = fleet.summarize(
                inputs, work, jobs, on, write, errors, since=since, left_out=left_out
            )
        else:
            from oomguard.cli.inputs import read_all

            found = read_all(inputs, work, jobs, on, write, errors)
    from oomguard.cli import show_error

    for error in errors:
        show_error(error)
    if errors:
        return 2
    if exit_code and found:
        return 1
    return 0


def _paths(inputs: Iterable[Input], *, is_named: bool) -> frozenset[str]:
    """Return the paths that the user named, or those that oomguard found in folders."""
    paths = set()
    for one in inputs:
        if one.is_named is is_named:
            paths.add(one.path)
    return frozenset(paths)


def _form_of(output: str | None) -> str:
    """Return the output format for the name of a file.

    Raises:
        UsageError: if no format has this ending.
    """
    suffix = Path(output or "").suffix.lower()
    if suffix not in _FORM_BY_SUFFIX and suffix[1:].isalpha():
        raise UsageError(
            f"--output {printable_path(str(output))}: oomguard has no output format {suffix}",
            hint="end the name in .json, .md, .html or .txt, or give --format",
        )
    return _FORM_BY_SUFFIX.get(suffix, "terminal")


def _report_configuration(ctx: click.Context, *, quiet: bool, verbose: bool) -> None:
    def write_line(text: str) -> None:
        click.echo(f"oomguard: {text}", err=True)

    def nothing(_text: str) -> None:
        pass

    report_configuration(ctx, nothing if quiet else write_line, write_line if verbose else nothing)


def _expand(
    paths: tuple[str, ...], since: float | None, *, summary: bool, quiet: bool
) -> tuple[list[Input], list[InputError], int]:
    """Return the inputs of the paths, errors for unreadable paths, and the number of old inputs.

    Messages name empty folders, skipped files, and paths that lead to the same file. A summary
    counts each file once, even if the user named it twice.
    """
    inputs = find_inputs(paths)
    for path in inputs.empty if not quiet else ():
        click.echo(f"oomguard: {printable_path(path)}: this folder contains no files", err=True)
    if inputs.dangling and not quiet:
        if len(inputs.dangling) > 1:
            others = f" and {len(inputs.dangling) - 1:,} more"
        else:
            others = ""
        click.echo(
            "oomguard: skipped a link without a target: "
            f"{printable_path(inputs.dangling[0])}{others}",
            err=True,
        )
    if inputs.no_logs and not quiet:
        if inputs.no_logs == 1:
            files = "1 file"
        else:
            files = f"{inputs.no_logs:,} files"
        click.echo(
            f"oomguard: skipped {files} in sub-folders (binary or source code). Name a file to "
            "read it",
            err=True,
        )
    found, repeated = read_once(inputs.found, keeps_named=not summary)
    if repeated and not quiet:
        if repeated == 1:
            led = "1 path led to a file that is"
        else:
            led = f"{repeated:,} paths led to files that are"
        click.echo(f"oomguard: {led} already read under another name", err=True)
    listed = len(found)
    if since is not None:
        recent = []
        for one in found:
            if one.modified_at is None or one.modified_at >= since:
                recent.append(one)
        found = recent
    left_out = listed - len(found)
    if left_out and not quiet:
        if left_out == 1:
            what = "1 input was"
        else:
            what = f"{left_out:,} inputs were"
        click.echo(
            f"oomguard: {what} last written before --since, so oomguard skipped it", err=True
        )
    return found, inputs.errors, left_out


def _follow(path: str, work: RenderOptions, write: Callable[[str], None]) -> bool:
    """Follow one log until it ends or Ctrl-C; return whether it shows an out-of-memory failure."""
    from oomguard.cli.inputs import InputRenderer

    def write_line(text: str) -> None:
        if not work.quiet:
            click.echo(f"oomguard: {text}", err=True)

    found = False
    # Ctrl-C is the normal end of --follow.
    with contextlib.suppress(KeyboardInterrupt):
        for oom in follow_input(path, InputRenderer(work), write, write_line):
            found = found or oom
    return found


def _console(output: str | None, color: str) -> Any:
    """Return the console for the panels; a file gets plain text."""
    if output is None or output == "-":
        return console(color)
    import io

    return console(color, file=io.StringIO())


# Follow one growing log for ``--follow``, and report each incident once.

# How often to look at a log that never pauses.
BUSY_S: Final = 5.0
# Unrecognized messages within this many lines belong to one failure.
SAME_FAILURE_LINES: Final = 400


def follow_input(
    path: str, renderer: InputRenderer, write: Callable[[str], None], say: Callable[[str], None]
) -> Iterator[bool]:
    """Write every new incident of a log; yield each time whether one was an out-of-memory.

    The end of a pipe ends it; a file never does.

    Args:
        path: the log, or ``-`` for standard input.
        renderer: diagnoses and renders the log.
        write: receives the text of new incidents.
        say: receives events of the file.

    Raises:
        InputError: if the log cannot be read or followed.
    """
    reading = _Reading(path, renderer)
    written_s = time.monotonic()
    for event in _events(path):
        if event.change is LogChange.DATA:
            reading.feed(event.data)
            if time.monotonic() - written_s < BUSY_S:
                continue
        else:
            reading.settle()
        yield _write_new(reading, renderer, write, is_quiet=event.change is not LogChange.DATA)
        written_s = time.monotonic()
        if event.change in {LogChange.WAITING, LogChange.TRUNCATED, LogChange.REPLACED}:
            say(f"{printable_path(path)}: {event.change.value}")
            reading = _Reading(path, renderer)
    reading.settle()
    yield _write_new(reading, renderer, write, is_quiet=True)


def _events(path: str) -> Iterator[Event]:
    if path == "-":
        yield from follow_stream(raw_standard_input())
        return
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        # The file may come later; reading it reports any other error.
        mode = stat.S_IFREG
    if stat.S_ISFIFO(mode):
        with Path(path).open("rb", buffering=0) as pipe:
            yield from follow_stream(pipe)
        return
    if not stat.S_ISREG(mode):
        # This reports why it is not a log.
        open_log(path).close()
    yield from follow(path)


def _write_new(
    reading: _Reading, renderer: InputRenderer, write: Callable[[str], None], *, is_quiet: bool
) -> bool:
    from oomguard.diagnosis import assess_all
    from oomguard.scan.incidents import with_labels

    diagnosis = with_labels(reading.new(is_quiet=is_quiet))
    if not diagnosis.incidents:
        return False
    diagnosis = assess_all(
        diagnosis, renderer.rules, renderer.policy, given=renderer.facts, model=renderer.work.model
    )
    write(renderer.render(diagnosis))
    return diagnosis.verdict == "oom"


class _Reading:
    """Hold one file from its start: its lines so far, and the reported incidents."""

    def __init__(self, path: str, renderer: InputRenderer) -> None:
        from oomguard.scan.lines import Pieces
        from oomguard.scan.scan import Scanner

        self._path = path
        self._renderer = renderer
        self._scanner = Scanner(renderer.rules, unrecognized=True)
        self._splitter: LineSplitter | None = None
        self._pieces = Pieces()
        self._head = b""
        self._wide = False
        self._reported: set[tuple[object, ...]] = set()
        self._reported_lines: list[int] = []

    def feed(self, data: bytes) -> None:
        """Take more bytes; keep the first few until they show the encoding."""
        if self._splitter is None:
            self._head += data
            if len(self._head) < HEAD_BYTES:
                return
            data = self._begin()
        self._push(data)

    def settle(self) -> None:
        """Take an unfinished line as it is, because nothing more comes for now."""
        if self._splitter is None and self._head:
            data = self._begin()
        else:
            data = b""
        if self._splitter is not None:
            self._push(data)
            # Half of a two-byte character must wait for its other half.
            if not self._wide:
                self._push(b"", final=True)

    def new(self, *, is_quiet: bool) -> Diagnosis:
        """Return the incidents that were not reported yet, as scanned.

        Unrecognized messages are reported only during a pause, because a recognized message may
        follow.
        """
        diagnosis = self._scanner.diagnosis(self._path, given=self._renderer.settings)
        new = []
        for incident in diagnosis.incidents:
            if _identity(incident) in self._reported:
                continue
            is_recognized = incident.certainty_ratio is None
            if is_recognized or (is_quiet and self._is_another(incident)):
                new.append(incident)
        self._reported.update(map(_identity, new))
        self._reported_lines += [incident.location.line or 0 for incident in new]
        return replace(diagnosis, incidents=tuple(new))

    def _is_another(self, incident: Incident) -> bool:
        line = incident.location.line or 0
        return all(abs(line - reported) > SAME_FAILURE_LINES for reported in self._reported_lines)

    def _begin(self) -> bytes:
        form = format_of(self._head, self._path)
        if form is not None:
            raise InputError(
                f"{printable_path(self._path)}: this is {form.name} data, which oomguard cannot "
                "follow",
                hint="run it without --follow",
            )
        encoding, first_byte = encoding_of(self._head)
        self._wide = encoding.startswith("utf-16")
        self._splitter = LineSplitter(encoding, first_byte)
        head = self._head
        self._head = b""
        return head

    def _push(self, data: bytes, *, final: bool = False) -> None:
        if self._splitter is not None:
            for line in self._splitter.feed(data, final=final):
                for whole in self._pieces.feed(line):
                    self._scanner.push(whole)


def _identity(incident: Incident) -> tuple[object, ...]:
    return (
        incident.kind,
        incident.start,
        incident.location.line,
        incident.location.byte,
        incident.location.process,
    )


def check_follow(paths: Sequence[str], form: str, *, summary: bool, on: str) -> None:
    """Check that the input can be followed: one local log, and a format without an end.

    Raises:
        UsageError: if it cannot.
    """
    if len(paths) > 1:
        raise UsageError(
            f"--follow takes one log, got {len(paths)}", hint="start one oomguard for each log"
        )
    if form == "html":
        raise UsageError(
            "--follow cannot write HTML, because its output has no end",
            hint="use --format json, md or terminal",
        )
    if summary or on != "local":
        if summary:
            other = "--summary"
        else:
            other = f"--on {on}"
        raise UsageError(
            f"--follow does not work with {other}, because a followed log has no end",
            hint="leave out one of them",
        )
    if is_url(paths[0]):
        raise UsageError(
            f"{printable_path(paths[0])}: oomguard cannot follow a remote object",
            hint="run it without --follow",
        )
    # accepts any name, even one with a null byte
    if paths[0] != "-" and os.path.isdir(paths[0]):  # noqa: PTH112
        raise UsageError(
            f"{printable_path(paths[0])}: oomguard cannot follow a folder",
            hint="name the log in it",
        )


# Where a command writes what it found: standard output, or a file that is cut back to what was
# written whole.
