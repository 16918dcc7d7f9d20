"""``oomguard diagnose``: saved or growing logs in, panel, JSON lines, Markdown or HTML out."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import click

from oomguard.cli.options import (
    F,
    Moment,
    color_option,
    console,
    option,
    policy_options,
    tell_configuration,
)
from oomguard.cli.render import RenderOptions, Screen
from oomguard.core.errors import InputError, UsageError
from oomguard.core.extensions import extension
from oomguard.scan.inputs import Input, find_inputs, read_once
from oomguard.scan.source import shown

# Where a command writes what it found: standard output, or a file that is cut back to what was
# written whole.


@contextlib.contextmanager
def sink(output: str | None, inputs: list[str], form: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes text out at once; raises UsageError for a file that cannot be
    written.
    """
    to_file = output is not None and output != "-"
    if sys.stdout is not None:
        standard = sys.stdout.buffer
    else:
        standard = None
    stream = _opened(str(output), inputs) if to_file else standard
    # What other programs read is UTF-8 whatever the terminal speaks; a name's undecodable bytes
    # become \udcNN, which is how JSON writes them too.
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
            _cut_back(
                str(output), 0 if form == "html" else whole_bytes
            )  # half a page tells nothing
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
                    f"--output {shown(output)}: is one of the inputs", hint="name another file"
                )
        return Path(output).open("wb", buffering=0)  # what fails is not tried again at the end
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--output {shown(output)}: {reason}", hint="name a file in a folder that exists"
        ) from None


FORMS: Final = ("terminal", "json", "markdown", "html")
_FORM_BY_SUFFIX: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".md": "markdown",
    ".html": "html",
    ".htm": "html",
    **dict.fromkeys(("", ".txt", ".text", ".log", ".out"), "terminal"),
}


class _Jobs(click.IntRange):
    """A number of processes; 0 stands for ``auto``."""

    name = "number of processes, or auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == "auto":
            return 0
        return int(super().convert(value, param, ctx))


_FLEET: Final = extension("fleet_summary")


def _summary_option(function: F) -> F:
    """Add --summary, if the package that groups incidents is installed."""
    if _FLEET is None:
        return function
    with_summary: F = _FLEET.summary_option(function)
    return with_summary


@click.command("diagnose")
@click.argument("paths", nargs=-1, metavar="[PATH …|-]")
@option(
    "--format",
    "form",
    type=click.Choice(FORMS),
    help="Output form. [default: by the name of --output, else terminal]",
)
@option("--output", metavar="FILE", help="Write there instead of to standard output (-).")
@option(
    "--gpu-memory",
    metavar="SIZE",
    help="The device's total memory, where the log leaves it out: 24GiB.",
)
@option(
    "--set",
    "given",
    multiple=True,
    metavar="SETTING=VALUE",
    help="A setting in force that the log leaves out. Repeatable.",
)
@option(
    "--model",
    metavar="MODEL",
    help="The model's folder, config.json or hub name: solves what the log leaves open.",
)
@option(
    "--follow",
    is_flag=True,
    help=(
        "Read on as the log grows, also when it is cut or replaced; each incident is told once. "
        "Ctrl-C ends it."
    ),
)
@option(
    "--jobs",
    type=_Jobs(0, 1024),
    default="auto",
    metavar="N|auto",
    help="Processes that read inputs. [default: auto]",
)
@option(
    "--on",
    "--engine",
    "on",
    type=click.Choice(["local", "ray"]),
    default="local",
    help=(
        "Where inputs are read: by processes here, or by the workers of a Ray cluster "
        "(RAY_ADDRESS, or the one that runs here)."
    ),
)
@_summary_option
@option(
    "--since",
    type=Moment(),
    metavar="AGE|DATE",
    help=(
        "Leave out inputs last written before then (24h, 7d, 2026-11-20), of a summary older "
        "incidents too."
    ),
)
@option("--exit-code", is_flag=True, help="Exit with 1 when an out-of-memory was found.")
@policy_options
@option(
    "--no-mask",
    is_flag=True,
    help="Print secrets, prompts and home folders as they stand in the log.",
)
@option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print incidents only: nothing for a clean input, except in JSON.",
)
@option(
    "-v",
    "--verbose",
    is_flag=True,
    help="On the terminal, also the settings in force and the facts, with sources.",
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
    """Say why memory ran out: each incident with its numbers, its cause, and what to change.

    PATH is a log, a memory snapshot of torch, a folder, a pattern, s3:// or gs://, or - for
    standard input. A folder means the files in it, sorted, and the logs in its sub-folders: hidden,
    binary and source files are left out there. gzip, zstd, xz and bzip2 are read directly. Results
    come in the order of the inputs.

    Exit status: 0 ran (also when Ctrl-C ended --follow), 2 bad usage, an unreadable or damaged
    input (told after all the rest is done) or a full disk for the output, 1 with --exit-code when
    an out-of-memory was found.
    """
    from oomguard.cli.render import RenderOptions

    _tell_configuration(ctx, quiet=quiet, verbose=verbose)
    if not paths:
        if sys.stdin is not None and sys.stdin.isatty():
            raise click.UsageError(
                "name a log, a folder, or - for standard input: oomguard diagnose error.log"
            )
        paths = ("-",)
    form = form or _form_of(output)
    if follow:
        from oomguard.cli.follow_log import check_follow

        check_follow(paths, form, summary=summary, on=on)
    elif summary and form == "html":
        raise UsageError(
            "--summary writes no page: only single diagnoses have one",
            hint="use terminal, json or markdown: oomguard diagnose --summary --format markdown",
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
            in_folders=frozenset(one.path for one in inputs if not one.is_named)
            - {one.path for one in inputs if one.is_named},
            summary=summary,
        )
        if follow:
            found = _follow(paths[0], work, write)
        elif summary and _FLEET is not None:
            found = _FLEET.summarize(
                inputs, work, jobs, on, write, errors, since=since, left_out=left_out
            )
        else:
            from oomguard.cli.read_inputs import read_all

            found = read_all(inputs, work, jobs, on, write, errors)
    from oomguard.cli import show_error

    for error in errors:
        show_error(error)
    if errors:
        return 2
    if exit_code and found:
        return 1
    return 0


def _form_of(output: str | None) -> str:
    """Return the form that the name of a file asks for.

    Raises:
        UsageError: it asks for one that there is not.
    """
    suffix = Path(output or "").suffix.lower()
    if suffix not in _FORM_BY_SUFFIX and suffix[1:].isalpha():
        raise UsageError(
            f"--output {shown(str(output))}: nothing is written as {suffix}",
            hint=(
                "name it .json, .md, .html or .txt, or give --format: terminal, json, markdown or "
                "html"
            ),
        )
    return _FORM_BY_SUFFIX.get(suffix, "terminal")


def _tell_configuration(ctx: click.Context, *, quiet: bool, verbose: bool) -> None:
    def say(text: str) -> None:
        click.echo(f"oomguard: {text}", err=True)

    def nothing(_text: str) -> None:
        pass

    tell_configuration(ctx, nothing if quiet else say, say if verbose else nothing)


def _expand(
    paths: tuple[str, ...], since: float | None, *, summary: bool, quiet: bool
) -> tuple[list[Input], list[InputError], int]:
    """Return the inputs that the paths name, an error for each that cannot be listed, and how many
    are older than ``since``.

    An empty folder is told, what is left out, and how many paths led to files of others: a summary
    counts each file once, also one that was named twice.
    """
    inputs = find_inputs(paths)
    for path in inputs.empty if not quiet else ():
        click.echo(f"oomguard: {shown(path)}: there is no file in this folder", err=True)
    if inputs.dangling and not quiet:
        if len(inputs.dangling) > 1:
            others = f" and {len(inputs.dangling) - 1:,} more"
        else:
            others = ""
        click.echo(
            "oomguard: left out, as a link that leads nowhere: "
            f"{shown(inputs.dangling[0])}{others}",
            err=True,
        )
    if inputs.no_logs and not quiet:
        if inputs.no_logs == 1:
            files = "1 file"
        else:
            files = f"{inputs.no_logs:,} files"
        click.echo(
            f"oomguard: left out {files} of sub-folders: binary or source code; name a file to "
            "read it",
            err=True,
        )
    found, repeated = read_once(inputs.found, keeps_named=not summary)
    if repeated and not quiet:
        if repeated == 1:
            led = "1 path led to a file that is"
        else:
            led = f"{repeated:,} paths led to files that are"
        click.echo(f"oomguard: {led} read under another name", err=True)
    listed = len(found)
    if since is not None:
        found = [one for one in found if one.modified_at is None or one.modified_at >= since]
    left_out = listed - len(found)
    if left_out and not quiet:
        if left_out == 1:
            what = "1 input was"
        else:
            what = f"{left_out:,} inputs were"
        click.echo(f"oomguard: {what} last written before --since and left out", err=True)
    return found, inputs.errors, left_out


def _follow(path: str, work: RenderOptions, write: Callable[[str], None]) -> bool:
    """Follow one log until it ends or Ctrl-C; return whether an out-of-memory was found."""
    from oomguard.cli.follow_log import follow_input
    from oomguard.cli.render import InputRenderer

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
