"""Show options in named groups, an example on each help page, and usage errors in two lines."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from oomguard.core.errors import UsageError

COMMON: Final = "Common"
# Two names at least as similar as this may be meant for each other.
_SIMILAR: Final = 0.65
# The last two groups; the last one contains --help.
ADVANCED: Final = "Advanced"
OUTPUT: Final = "Output and help"


class Option(click.Option):
    """An option with the heading under which the help page lists it.

    ``show_default`` is the default in words, or True for the value itself.

    Args:
        group: the heading.
        example: a valid value, which error messages show.
    """

    def __init__(
        self, *args: Any, group: str = OUTPUT, example: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.group = group
        self.example = example
        if self.metavar is None and isinstance(self.type, click.IntRange):
            self.metavar = "N"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names of the option, and its help with the default."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        return record[0], " ".join(filter(None, (self.help, self.default_in_words())))

    def default_in_words(self) -> str:
        """Return the default as the help page shows it; "" without one."""
        if isinstance(self.show_default, str):
            return f"[default: {self.show_default}]"
        if self.show_default:
            return f"[default: {self.default}]"
        return ""


class GroupedCommand(click.Command):
    """A command whose help page shows options in groups, then an example.

        @click.command("plan", cls=Command, common=("sweep",), example="oomguard plan m --sweep …")

    Args:
        common: the parameters that matter first, in the order of the page.
        example: a command line that works.
        renamed: old spelling of an option -> its present one.
    """

    def __init__(
        self,
        *args: Any,
        common: Sequence[str] = (),
        example: str = "",
        renamed: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.common = common
        self.example = example
        self.renamed = renamed or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace old spellings, with one warning each, then parse."""
        words = []
        for word in args:
            name, joined, value = word.partition("=")
            if name in self.renamed:
                words.append(f"{self.renamed[name]}{joined}{value}")
                warn_of_old_name(name, self.renamed[name])
            else:
                words.append(word)
        try:
            return super().parse_args(ctx, words)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click's parser does not know the command
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups."""
        sections: dict[str, list[tuple[str, str]]] = {COMMON: []}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for option in sorted(options, key=self._rank):
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self._group_of(option), []).append(record)
        for title in (ADVANCED, OUTPUT):
            sections[title] = sections.pop(title, [])
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example on one line, ready to paste."""
        super().format_epilog(ctx, formatter)
        write_lines(formatter, "Example", [self.example] if self.example else [])

    def _rank(self, param: click.Parameter) -> int:
        if param.name in self.common:
            return self.common.index(param.name)
        return len(self.common)

    def _group_of(self, param: click.Parameter) -> str:
        if param.name in self.common:
            return COMMON
        return getattr(param, "group", OUTPUT)


class Group(click.Group):
    """A group of commands that suggests the nearest name for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the words name.

        Raises:
            UsageError: no command has this name.
        """
        unknown = args[0] not in self.list_commands(ctx)
        if unknown and not ctx.resilient_parsing and not args[0].startswith("-"):
            if ctx.parent is None:
                message = f"there is no command {args[0]!r}"
            else:
                message = f"{_short(ctx)} has no command {args[0]!r}"
            raise UsageError(message, hint=self._suggestion(ctx, args))
        return super().resolve_command(ctx, args)

    def _suggestion(self, ctx: click.Context, args: list[str]) -> str:
        """Return the line that the user may have meant."""
        import difflib

        near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1, cutoff=_SIMILAR)
        if near:
            return f"did you mean: {shlex.join([*ctx.command_path.split(), near[0], *args[1:]])}"
        if ctx.parent is None and Path(args[0]).exists():
            return f"to read it: oomguard diagnose {shlex.quote(args[0])}"
        if ctx.parent is None and (len(args) > 1 or shutil.which(args[0]) is not None):
            return f"to run it under oomguard: oomguard run -- {shlex.join(args)}"
        return f"{ctx.command_path} --help lists the commands"


def warn_of_old_name(old: str, new: str) -> None:
    """Report on standard error that an option or a command has a new name."""
    click.echo(f"oomguard: {old} is now called {new}; the old name still works", err=True)


def write_lines(formatter: click.HelpFormatter, title: str, lines: Iterable[str]) -> None:
    """Write lines as they are under a heading; nothing without lines."""
    rows = list(lines)
    if not rows:
        return
    with formatter.section(title):
        for line in rows:
            formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def as_usage_error(error: click.ClickException) -> UsageError:
    """Return click's error as ours: which input is wrong and why, then what to write instead."""
    ctx = getattr(error, "ctx", None)
    if ctx is None:
        return UsageError(_plain(error.format_message()))
    example = getattr(ctx.command, "example", "")
    if example:
        hint = f"for example: {example}"
    else:
        hint = f"{ctx.command_path} --help lists the options"
    if isinstance(error, click.NoSuchOption):
        return _of_unknown_option(error, ctx)
    if isinstance(error, click.BadOptionUsage):
        option = _option_named(ctx, error.option_name)
        message = _plain(error.format_message()).replace("requires an argument", "needs a value")
        return UsageError(message, hint=_example_of(option, hint))
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.metavar or error.param.human_readable_name
        return UsageError(f"{_short(ctx)} needs {name.strip('[]')}", hint=hint)
    if isinstance(error, click.BadParameter) and error.param is not None:
        name = _name_of(error.param)
        if isinstance(error.param.type, click.Path):
            message = f"{_plain(error.message)} (for {name})"
        else:
            message = f"{name}: {_plain(error.message)}"
        return UsageError(message, hint=_example_of(error.param, hint))
    return UsageError(f"{_short(ctx)}: {_plain(error.format_message())}", hint=hint)


def _short(ctx: click.Context) -> str:
    """Return the name of a command as it stands after ``oomguard``."""
    return ctx.command_path.removeprefix("oomguard ")


def _of_unknown_option(error: click.NoSuchOption, ctx: click.Context) -> UsageError:
    import difflib

    if ctx.parent is None:
        message = f"there is no option {error.option_name}"
    else:
        message = f"{_short(ctx)} has no option {error.option_name}"
    shown = [
        name
        for param in ctx.command.get_params(ctx)
        if isinstance(param, click.Option) and not param.hidden
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("--")
    ]
    near = difflib.get_close_matches(error.option_name, shown, n=1, cutoff=_SIMILAR)
    near = near or list(error.possibilities or ())
    if near:
        return UsageError(message, hint=f"did you mean {near[0]}?")
    return UsageError(message, hint=f"{ctx.command_path} --help lists the options")


def _option_named(ctx: click.Context, name: str) -> click.Parameter | None:
    for param in ctx.command.get_params(ctx):
        if name in (*param.opts, *param.secondary_opts):
            return param
    return None


def _name_of(param: click.Parameter) -> str:
    """Return the name of an option or an argument."""
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return (param.metavar or param.human_readable_name).strip("[]")


def _example_of(param: click.Parameter | None, otherwise: str) -> str:
    """Return a valid use of an option."""
    if not isinstance(param, click.Option):
        return otherwise
    value = getattr(param, "example", None)
    if value is None and isinstance(param.type, click.Choice):
        value = str(param.type.choices[0])
    if value is None and isinstance(param.type, (click.IntRange, click.FloatRange)):
        value = param.default or param.type.min or 1
    if value is None:
        return otherwise
    return f"for example: {_name_of(param)} {value}"


def _plain(message: str) -> str:
    """Return click's sentence as part of ours: no capital, no full stop."""
    return (message[:1].lower() + message[1:]).rstrip(".")
