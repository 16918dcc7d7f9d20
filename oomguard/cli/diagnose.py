"""``oomguard diagnose``: saved or growing logs in, panel, JSON lines, Markdown or HTML out."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from oomguard.cli.options import color_option, console, option, policy_options, tell_configuration
from oomguard.errors import InputError, UsageError
from oomguard.observe.source import shown

if TYPE_CHECKING:
    from oomguard.cli.rendering import RenderedInput, Work

FORMS: Final = ("terminal", "json", "markdown", "html")
_FORM_BY_SUFFIX: Final = {".json": "json", ".jsonl": "json", ".md": "markdown", ".html": "html", ".htm": "html"}


class _Jobs(click.IntRange):
    """A number of processes; 0 stands for ``auto``."""

    name = "number of processes, or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return 0 if value == "auto" else int(super().convert(value, param, ctx))


@click.command("diagnose")
@click.argument("paths", nargs=-1, metavar="[PATH …|-]")
@option(
    "--format", "form", type=click.Choice(FORMS), help="Output form. [default: by the name of --output, else terminal]"
)
@option("--output", metavar="FILE", help="Write there instead of to standard output (-).")
@option("--gpu-memory", metavar="SIZE", help="The device's total memory, where the log leaves it out: 24GiB.")
@option(
    "--set",
    "given",
    multiple=True,
    metavar="SETTING=VALUE",
    help="A setting in force that the log leaves out. Repeatable.",
)
@option(
    "--model", metavar="MODEL", help="The model's folder, config.json or hub name: solves what the log leaves open."
)
@option(
    "--follow",
    is_flag=True,
    help="Read on as the log grows, also when it is cut or replaced; each incident is told once. Ctrl-C ends it.",
)
@option(
    "--jobs", type=_Jobs(0, 1024), default="auto", metavar="N|auto", help="Processes that read inputs. [default: auto]"
)
@option("--exit-code", is_flag=True, help="Exit with 1 when an out-of-memory was found.")
@policy_options
@option("--no-mask", is_flag=True, help="Print secrets, prompts and home folders as they stand in the log.")
@option("-q", "--quiet", is_flag=True, help="Print incidents only: nothing for a clean input, except in JSON.")
@option(
    "-v", "--verbose", is_flag=True, help="On the terminal, also the settings in force and the facts, with sources."
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
    exit_code: bool,
    allow: str | None,
    pinned: tuple[str, ...],
    floors: tuple[str, ...],
    rules: tuple[str, ...],
    no_mask: bool,
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Say why memory ran out: each incident with its numbers, its cause, and what to change.

    PATH is a log, a memory snapshot of torch, a folder, or - for standard input. A folder means the files in it, sorted, not those in its
    sub-folders. gzip, zstd, xz and bzip2 are read directly. Results come in the order of the inputs.

    Exit status: 0 ran (also when Ctrl-C ended --follow), 2 bad usage, an unreadable or damaged input (told after all
    the rest is done) or a full disk for the output, 1 with --exit-code when an out-of-memory was found.
    """
    from oomguard.cli.rendering import Screen, Work

    _tell_configuration(ctx, quiet=quiet, verbose=verbose)
    if not paths:
        if sys.stdin is not None and sys.stdin.isatty():
            raise click.UsageError("name a log, a folder, or - for standard input: oomguard diagnose error.log")
        paths = ("-",)
    form = form or _FORM_BY_SUFFIX.get(Path(output or "").suffix.lower(), "terminal")
    inputs, errors = ([paths[0]], []) if follow else _expand(paths, quiet=quiet)
    if follow:
        _check_follow(paths, form)
    with _sink(output, inputs, form) as write:
        screen = Screen.of(_console(output, color)) if form == "terminal" else None
        work = Work(
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
            in_folders=frozenset(inputs) - frozenset(paths),
        )
        found = _follow(inputs[0], work, write) if follow else _diagnose(inputs, work, jobs, write, errors)
    from oomguard.cli import show_error

    for error in errors:
        show_error(error)
    if errors:
        return 2
    return 1 if exit_code and found else 0


def _tell_configuration(ctx: click.Context, *, quiet: bool, verbose: bool) -> None:
    def say(text: str) -> None:
        click.echo(f"oomguard: {text}", err=True)

    def nothing(_text: str) -> None:
        pass

    tell_configuration(ctx, nothing if quiet else say, say if verbose else nothing)


def _expand(paths: tuple[str, ...], *, quiet: bool) -> tuple[list[str], list[InputError]]:
    """Return the inputs, a folder as the regular files in it, sorted, and an error for each that cannot be read; tell an empty one."""
    inputs: list[str] = []
    errors = []
    for path in paths:
        try:
            if path == "-" or not Path(path).is_dir():
                inputs.append(path)
            else:
                files = [str(child) for child in sorted(Path(path).iterdir()) if child.is_file()]
                inputs += files
                if not files and not quiet:
                    click.echo(f"oomguard: {shown(path)}: there is no file in this folder", err=True)
        except OSError as error:
            errors.append(InputError(f"{shown(path)}: {error.strerror}"))
        except ValueError:  # a null byte in the name, which reading it reports
            inputs.append(path)
    return inputs, errors


def _sizes(inputs: list[str]) -> dict[str, int]:
    """Return the bytes of the inputs that are files."""
    sizes = {}
    for path in inputs:
        with contextlib.suppress(OSError, ValueError):
            about = Path(path).stat()
            if path != "-" and stat.S_ISREG(about.st_mode):
                sizes[path] = about.st_size
    return sizes


def _diagnose(inputs: list[str], work: Work, jobs: int, write: Callable[[str], None], errors: list[InputError]) -> bool:
    """Diagnose every input and write what comes out, in their order; return whether an out-of-memory was found."""
    from oomguard.cli.progress import ReadingProgress
    from oomguard.cli.rendering import InputRenderer, OnePage

    renderer, sizes, page, found = InputRenderer(work), _sizes(inputs), OnePage(), False
    if len(inputs) > 1:
        from oomguard.cli.workers import automatic_jobs, in_parallel

        jobs = min(jobs or automatic_jobs(sizes), len(inputs))
    else:
        jobs = 1
    with ReadingProgress(len(inputs), sum(sizes.get(path, 0) for path in inputs), write) as progress:
        on_read = progress.read if progress.shown else None

        def own(path: str) -> RenderedInput:
            return renderer.diagnose(path, on_read)

        outcomes: Generator[RenderedInput]
        outcomes = in_parallel(work, inputs, jobs, own, on_read) if jobs > 1 else (own(path) for path in inputs)
        with contextlib.closing(outcomes):
            for outcome in outcomes:
                progress.finish(page.add(outcome.text) if work.form == "html" and outcome.text else outcome.text)
                found = found or outcome.found
                if outcome.error:
                    errors.append(InputError(outcome.error, hint=outcome.hint))
    write(page.end())
    return found


def _check_follow(paths: tuple[str, ...], form: str) -> None:
    if len(paths) > 1:
        raise UsageError(f"--follow reads one log, not {len(paths)}", hint="start one oomguard for each log")
    if form == "html":
        raise UsageError("--follow cannot write a page: it has no end", hint="--format json, markdown or terminal")
    if paths[0] != "-" and os.path.isdir(paths[0]):  # noqa: PTH112 - takes any name, also one with a null byte
        raise UsageError(f"{shown(paths[0])}: a folder cannot be followed", hint="name the log in it")


def _follow(path: str, work: Work, write: Callable[[str], None]) -> bool:
    """Follow one log until it ends or Ctrl-C; return whether an out-of-memory was found."""
    from oomguard.cli.following import follow_input
    from oomguard.cli.rendering import InputRenderer

    def say(text: str) -> None:
        if not work.quiet:
            click.echo(f"oomguard: {text}", err=True)

    found = False
    with contextlib.suppress(KeyboardInterrupt):  # the way a follow ends, not a failure
        for oom in follow_input(path, InputRenderer(work), write, say):
            found = found or oom
    return found


def _console(output: str | None, color: str) -> Any:
    """Return the console that the panels are for; a file gets plain text."""
    if output is None or output == "-":
        return console(color)
    import io

    return console(color, file=io.StringIO())


@contextlib.contextmanager
def _sink(output: str | None, inputs: list[str], form: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes text out at once; raises UsageError for a file that cannot be written."""
    to_file = output is not None and output != "-"
    standard = sys.stdout.buffer if sys.stdout is not None else None
    stream = _open_output(str(output), inputs) if to_file else standard
    # What other programs read is UTF-8 whatever the terminal speaks; a name's undecodable bytes become \udcNN, which
    # is how JSON writes them too.
    encoding = "utf-8" if to_file or form != "terminal" or sys.stdout is None else sys.stdout.encoding

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
            _cut_back(str(output), 0 if form == "html" else whole_bytes)  # half a page tells nothing
            reason = error.strerror or error
            raise UsageError(
                f"--output {shown(str(output))}: {reason}", hint="name a file where there is room"
            ) from None
        whole_bytes += size_bytes

    try:
        yield write
    finally:
        if to_file and stream is not None:
            stream.close()


def _cut_back(output: str, size_bytes: int) -> None:
    """Leave of a file that did not take all what was written whole; without any, no file."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(Path(output).stat().st_mode):
            os.truncate(output, size_bytes) if size_bytes else Path(output).unlink()


def _open_output(output: str, inputs: list[str]) -> IO[bytes]:
    try:
        for path in inputs:
            if path != "-" and Path(output).exists() and Path(path).exists() and Path(path).samefile(output):
                raise UsageError(f"--output {shown(output)}: is one of the inputs", hint="name another file")
        return Path(output).open("wb", buffering=0)  # what fails is not tried again at the end
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--output {shown(output)}: {reason}", hint="name a file in a folder that exists") from None
