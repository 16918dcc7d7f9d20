"""The ``oomguard`` command: one file per sub-command, loaded when it is called."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any, Final

import click

from oomguard._version import __version__
from oomguard.cli.config import read_configuration
from oomguard.cli.standard_output import GONE_STATUS, OutputLostError, pass_on, told_apart
from oomguard.core.errors import OomguardError, exit_status_of
from oomguard.core.extensions import optional_commands

# Name -> (module, one line for --help): the help page needs no sub-command's imports.
_COMMANDS: Final = {
    "run": (
        "oomguard.cli.run",
        "Run a command; when it dies of memory, say why, change the least that fits, run it again.",
    ),
    "diagnose": (
        "oomguard.cli.diagnose",
        "Say why memory ran out, from saved logs or standard input.",
    ),
    "diff": (
        "oomguard.cli.diff",
        "Say what changed between a start that worked and one that did not.",
    ),
    "plan": (
        "oomguard.cli.plan",
        "Say where the bytes of each GPU will go, before anything is started.",
    ),
    **optional_commands(),
    "report": (
        "oomguard.cli.report",
        "Write what a start measured as a record without names, to contribute.",
    ),
    "history": (
        "oomguard.cli.history",
        "List past runs: what failed, what was changed, predicted beside measured.",
    ),
    "rules": ("oomguard.cli.rules", "List, show, check and test rule files."),
    "doctor": (
        "oomguard.cli.doctor",
        "Look at this machine: versions, devices, plugin, variables, limits.",
    ),
}
# Commands that tell themselves what was read of the files of options: they know -q, -v and where
# messages go.
_TELLING: Final = frozenset({"run", "diagnose"})


class _LazyGroup(click.Group):
    """A group that imports a sub-command when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name][0]).command
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with told_apart():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with told_apart():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="oomguard", message="%(prog)s %(version)s")
@click.pass_context
def _group(ctx: click.Context) -> None:
    """When LLM inference runs out of memory: say why with numbers, change the least that fits, run
    again.

    Every option can also be given as OOMGUARD_<OPTION>, or in your own file,
    ~/.config/oomguard/config.toml. [tool.oomguard] of the working directory's pyproject.toml only
    restricts.
    """
    ctx.obj = read_configuration()
    ctx.default_map = dict.fromkeys(_COMMANDS, ctx.obj.options)
    if ctx.invoked_subcommand not in _TELLING:
        ctx.obj.tell(lambda text: click.echo(f"oomguard: {text}", err=True), lambda _text: None)


def main(argv: list[str] | None = None) -> Any:
    """Run the command line and exit; a user's mistake is one message and status 2, never a
    traceback.
    """
    if argv is None:
        words = sys.argv[1:]
    else:
        words = argv
    status = _status_of(words)
    if (lost := pass_on(1)) is not None and not status:
        status = _told(lost)
    pass_on(2)
    sys.exit(status if isinstance(status, int) else 0)


def _status_of(words: list[str]) -> Any:
    """Run the command line; return its exit status."""
    try:
        return run_group(words)
    except Exception as error:  # noqa: BLE001
        # a failure of oomguard's own has a status that no command has
        show_error(OomguardError(f"internal error: {type(error).__name__}: {error}"))
        if "-v" in words or "--verbose" in words:
            with contextlib.suppress(OSError):
                import traceback

                traceback.print_exc()
        return 125


def run_group(words: list[str]) -> Any:
    """Run the command line; return its exit status, where it is not oomguard itself that fails."""
    try:
        return _group.main(args=words, prog_name="oomguard", standalone_mode=False)
    except OutputLostError as error:
        return _told(error)
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # nobody reads it: the exit status still tells
            error.show()
        return 2
    except OomguardError as error:
        show_error(error)
        return exit_status_of(error)


def _told(lost: OutputLostError) -> int:
    """Say why our output is lost, but for a reader that wanted no more; return the exit status."""
    if lost.exit_status != GONE_STATUS:
        show_error(OomguardError(f"standard output: {lost}"))
    return lost.exit_status


def show_error(error: OomguardError) -> None:
    """Print an error on standard error: what happened, then what to do."""
    from oomguard.report.presentable import (
        drawn,
    )  # what it quotes may be a command's secret, or a stranger's path
    from oomguard.report.redact import homes_kept

    hint = getattr(error, "hint", None)
    with contextlib.suppress(
        OSError, AttributeError
    ):  # nobody reads it: the exit status still tells
        click.echo(drawn(f"oomguard: {error}"), err=True)
        if hint:
            with homes_kept():  # it may be a command to paste
                click.echo(drawn(f"  {hint}"), err=True)
