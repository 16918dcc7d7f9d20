"""Define the ``oomguard`` command; the file of a sub-command is loaded when it is called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from oomguard.cli.options import (
    Group,
    as_usage_error,
    read_configuration,
    source_of,
    warn_of_old_name,
    write_lines,
)
from oomguard.core.errors import OomguardError, UsageError, exit_status_of
from oomguard.core.installation import __version__, optional_commands

# Handle our own output if it is lost: its reader is gone (``| head``), or the disk is full.
#
# Python would try its remaining output once more at exit, and exit with status 120.

# The status of a program that SIGPIPE ends (grep, git, cat). --exit-code never gives it.
GONE_STATUS: Final = 141
# A pipeline must not take a cut file for a whole one, so this is not 0.
FULL_STATUS: Final = 2
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class OutputLostError(Exception):
    """Report that printed text did not arrive.

    It is not an OSError, because click turns that into its own exit status.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__(os.strerror(number or errno.EIO))
        if number == errno.EPIPE:
            self.exit_status = GONE_STATUS
        else:
            self.exit_status = FULL_STATUS


@contextlib.contextmanager
def separate_lost_output() -> Iterator[None]:
    """Raise OutputLostError for a failed write to a descriptor, but not for a named file."""
    try:
        yield
    except OSError as error:
        # An error of a named file is about that file, not about our output.
        if error.filename is None and error.errno in {errno.EPIPE, *_FULL}:
            raise OutputLostError(error.errno) from error
        raise


def flush_stream(number: int) -> OutputLostError | None:
    """Flush standard output (1) or error (2); on failure drop the rest and return the failure."""
    stream = {1: sys.stdout, 2: sys.stderr}[number]
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)
        return OutputLostError(getattr(error, "errno", None))
    return None


# Name -> (module, one line for --help). The help page imports no sub-command.
_COMMANDS: Final = {
    "diagnose": (
        "oomguard.cli.diagnose",
        "Explain why memory ran out, from saved logs or standard input.",
    ),
    "run": (
        "oomguard.cli.run",
        "Run a command; after an out-of-memory failure, fix it and rerun.",
    ),
    "plan": (
        "oomguard.cli.plan",
        "Estimate the memory of each GPU before you start anything.",
    ),
    "explain": (
        "oomguard.cli.explain",
        "Explain a rule's code, a kind of failure, or an error message in quotes.",
    ),
    "doctor": (
        "oomguard.cli.doctor",
        "Check this machine: versions, devices, plugin, variables, limits.",
    ),
    "history": (
        "oomguard.cli.history",
        "List past runs with their failures, changes and results.",
    ),
    "diff": (
        "oomguard.cli.diff",
        "Compare an engine start that worked with one that failed.",
    ),
    **optional_commands(),
    "rules": ("oomguard.cli.rules", "List, show, check and test rule files."),
    "contribute": (
        "oomguard.cli.contribute",
        "Write the figures of an engine start as an anonymous record to share.",
    ),
}
# Commands of the first section of the help page; all others are in the second.
_MAIN: Final = ("diagnose", "run", "plan", "explain", "doctor")
_OLD_NAMES: Final = {"report": "contribute"}
_EXAMPLES: Final = (
    "oomguard diagnose error.log",
    "oomguard run -- vllm serve Qwen/Qwen3-8B",
    "oomguard plan Qwen/Qwen3-8B --gpu-memory 24GiB",
    "oomguard doctor",
)
_COMPLETION: Final = (
    'eval "$(_OOMGUARD_COMPLETE=bash_source oomguard)"',
    "(zsh_source in zsh; fish_source in fish)",
)
# Commands that report the configuration files themselves, because they know -q, -v and where
# messages go.
_REPORTING: Final = frozenset({"run", "diagnose"})


class _LazyGroup(Group):
    """Import a sub-command only when the user names it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _OLD_NAMES:
            name = _OLD_NAMES[args[0]]
            warn_of_old_name(f"oomguard {args[0]}", f"oomguard {name}")
            args = [name, *args[1:]]
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with separate_lost_output():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with separate_lost_output():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, the main ones first, then the few options of the group."""
        for title, is_main in (("Main commands", True), ("More commands", False)):
            with formatter.section(title):
                rows = []
                for name, (_, text) in _COMMANDS.items():
                    if (name in _MAIN) is is_main:
                        rows.append((name, text))
                formatter.write_dl(rows)
        click.Command.format_options(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_lines(formatter, "Examples", _EXAMPLES)
        write_lines(formatter, "Shell completion", _COMPLETION)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="oomguard", message="%(prog)s %(version)s")
@click.pass_context
def _group(ctx: click.Context) -> None:
    """Explain why LLM inference ran out of memory, and run it again with settings that fit.

    You can also set every option as a variable OOMGUARD_<OPTION>, or in the file
    ~/.config/oomguard/config.toml.
    """
    ctx.obj = read_configuration()
    ctx.default_map = dict.fromkeys(_COMMANDS, ctx.obj.options)
    if ctx.invoked_subcommand not in _REPORTING:
        ctx.obj.report(lambda text: click.echo(f"oomguard: {text}", err=True), lambda _text: None)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line and exit; a user's mistake gives one message and status 2."""
    if argv is None:
        words = sys.argv[1:]
    else:
        words = argv
    status = _status_of(words)
    if (lost := flush_stream(1)) is not None and not status:
        status = _report_lost(lost)
    flush_stream(2)
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(words: list[str]) -> Any:
    """Run the command line; return its exit status."""
    try:
        return run_group(words)
    except Exception as error:  # noqa: BLE001
        # An internal error has a status that no command has.
        show_error(OomguardError(f"internal error: {type(error).__name__}: {error}"))
        if "-v" in words or "--verbose" in words:
            with contextlib.suppress(OSError):
                import traceback

                traceback.print_exc()
        return 125


def run_group(words: list[str]) -> Any:
    """Run the command line; return its exit status. Internal errors are raised."""
    try:
        return _group.main(args=words, prog_name="oomguard", standalone_mode=False)
    except OutputLostError as error:
        return _report_lost(error)
    except click.exceptions.Abort:
        # Ctrl-C at a question: 128 + SIGINT, as a shell reports it.
        return 130
    except click.BadParameter as error:
        source = source_of(_long_name(error.param), words)
        if source is None:
            show_error(as_usage_error(error))
        else:
            show_error(UsageError(f"{source}: {error.message}"))
        return 2
    except click.ClickException as error:
        # oomguard alone shows its help page, from click 8.2 on as an error
        if type(error).__name__ == "NoArgsIsHelpError":
            # without a reader, the exit status still reports the error
            with contextlib.suppress(OSError):
                error.show()
        else:
            show_error(as_usage_error(error))
        return 2
    except OomguardError as error:
        show_error(_with_source(error, words))
        return exit_status_of(error)


def _long_name(parameter: click.Parameter | None) -> str:
    """Return the name of an option without its dashes; "" for an argument."""
    for name in getattr(parameter, "opts", ()):
        if name.startswith("--"):
            return str(name[2:])
    return ""


def _with_source(error: OomguardError, words: list[str]) -> OomguardError:
    """Return the error about an option with the variable or file that sets the option."""
    flag = str(error).partition(" ")[0].rstrip(":")
    if not isinstance(error, UsageError) or not flag.startswith("--"):
        return error
    source = source_of(flag[2:], words)
    if source is None:
        return error
    return UsageError(f"{source}: {error}", hint=error.hint)


def _report_lost(lost: OutputLostError) -> int:
    """Report why output is lost, unless its reader just stopped; return the exit status."""
    if lost.exit_status != GONE_STATUS:
        show_error(OomguardError(f"standard output: {lost}"))
    return lost.exit_status


def show_error(error: OomguardError) -> None:
    """Print an error on standard error: what happened, then what to do."""
    # The message may quote a secret of a command, or a stranger's path.
    from oomguard.core.presentable import drawn
    from oomguard.core.redact import homes_kept

    hint = getattr(error, "hint", None)
    # Without a reader, the exit status still reports the error.
    with contextlib.suppress(OSError, AttributeError):
        click.echo(drawn(f"oomguard: {error}"), err=True)
        if hint:
            # The hint may be a command to paste.
            with homes_kept():
                click.echo(drawn(f"  {hint}"), err=True)
