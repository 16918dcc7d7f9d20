"""Define the options that several sub-commands share, and read options from files."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO, TypeVar

import click

from oomguard.core.errors import OomguardError, SettingError, UsageError
from oomguard.core.facts import MIB, FactValue, parse_size
from oomguard.core.files import read_regular, user_folder
from oomguard.core.incident import Effect
from oomguard.core.settings import parse_assignment
from oomguard.core.text import strip_escapes
from oomguard.remedy.policy import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_PER_HOUR,
    Policy,
    make_policy,
    pinned_name,
)

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.journal.location import Location
    from oomguard.rules.rule_files import RuleSet


# Show options in named groups, an example on each help page, and usage errors in two lines.

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

        @click.command("plan", cls=GroupedCommand, common=("sweep",), example="oomguard plan")

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
        # Scripts of users still contain old names.
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
            # click's parser does not know the command.
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in their groups."""
        sections: dict[str, list[tuple[str, str]]] = {COMMON: []}
        options = []
        for param in self.get_params(ctx):
            if isinstance(param, click.Option):
                options.append(param)
        for option in sorted(options, key=self._rank):
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(self._group_of(option), []).append(record)
        # Rare options come last, in this order.
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
    """A group of commands that suggests the nearest name for a misspelled one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the words name.

        Raises:
            UsageError: no command has this name.
        """
        # click's own message suggests nothing. A shell that completes a name must get no error.
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
        # `oomguard error.log` and `oomguard vllm serve` are easy mistakes.
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
    # click's errors differ in what they know: the option, the parameter, or only a sentence.
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
    shown = []
    for param in ctx.command.get_params(ctx):
        if not isinstance(param, click.Option) or param.hidden:
            continue
        for name in (*param.opts, *param.secondary_opts):
            if name.startswith("--"):
                shown.append(name)
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
        # The long name explains itself.
        return max(param.opts, key=len)
    return (param.metavar or param.human_readable_name).strip("[]")


def _example_of(param: click.Parameter | None, otherwise: str) -> str:
    """Return a valid use of an option."""
    if not isinstance(param, click.Option):
        return otherwise
    value = getattr(param, "example", None)
    # A choice and a number have an obvious example, so their options need not name one.
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


# The options that several sub-commands share.

# Every option with a time accepts ``90`` (seconds), ``30m``, ``1h30m`` or ``1d2h``.
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PARTS: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+")
_PART: Final = re.compile(r"([0-9.]+)([smhdw])")
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?|\.[0-9]+")
# About 31 years. Python's locks reject times that are much longer.
_LONGEST_S: Final = 10**9


def seconds_of(text: str) -> float | None:
    """Return a time in seconds; None if the text is not a time.

    >>> seconds_of("1h30m")
    5400.0
    """
    text = text.strip().lower()
    if _PARTS.fullmatch(text):
        return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    if _NUMBER.fullmatch(text):
        return float(text)
    return None


def seconds_in(value: object) -> float | None:
    """Return a time from a configuration file in seconds: a number, or text as a flag takes it.

    None if the value is neither.
    """
    if isinstance(value, str):
        return seconds_of(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return None


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept a time of at most 10^9 seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the time in seconds."""
        seconds = float(value) if isinstance(value, (int, float)) else seconds_of(str(value))
        if seconds is None or not 0 <= seconds <= _LONGEST_S:
            self.fail(f"{value!r} is not a time such as 30m, 1h30m or 90 (seconds)", param, ctx)
        return seconds


class HostReserve(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept a size with a unit, ``auto`` or ``0``."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        """Return the bytes, or ``auto``."""
        text = str(value).strip()
        if text in {"auto", "0"}:
            return 0 if text == "0" else text
        size = None
        with contextlib.suppress(SettingError):
            size = parse_size(text).bytes
        if size is None or not text[-1].isalpha():
            self.fail(f"{value!r} is not a size with a unit, auto or 0: write 4GiB", param, ctx)
        return size


class SizeText(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept a size above zero with a unit; the command gets the text as it is."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        text = str(value).strip()
        if _NUMBER.fullmatch(text.lower()):
            # No device has less than 1 MiB, so a larger number can only be bytes, as a script has.
            if float(text) < MIB:
                self.fail(
                    f"{text!r} has no unit; write {text}GiB, {text}MiB or {text}B", param, ctx
                )
            return f"{text}B"
        try:
            size_bytes = parse_size(text).bytes
        except SettingError as error:
            self.fail(f"{error}", param, ctx)
        if size_bytes <= 0:
            self.fail(f"a size must be above zero, got {text!r}", param, ctx)
        return text


class SettingName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept the name of a setting or of an engine's argument."""

    name = "setting"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as it is."""
        try:
            pinned_name(str(value))
        except SettingError as error:
            self.fail(_with_hint(error), param, ctx)
        return str(value)


class Assignment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept SETTING=VALUE; the command gets the text as it is."""

    name = "assignment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        try:
            parse_assignment(str(value))
        except SettingError as error:
            self.fail(_with_hint(error), param, ctx)
        return str(value)


def _with_hint(error: SettingError) -> str:
    """Return an error with the nearest name; the option's own example replaces other hints."""
    if (error.hint or "").startswith("did you mean"):
        return f"{error}; {error.hint}"
    return f"{error}"


class Age(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept a time before now. It needs a unit, because a bare 7 may mean days."""

    name = "age"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the age in seconds."""
        text = str(value)
        seconds = None if _NUMBER.fullmatch(text.strip().lower()) else seconds_of(text)
        if seconds is None or seconds >= time.time():
            self.fail(
                f"{value!r} is not an age with a unit, such as 90m, 12h, 7d or 2w", param, ctx
            )
        return seconds


class Moment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Accept an age or an ISO 8601 date or time, which may be in the future.

    A time without a zone is local.
    """

    name = "moment"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the moment in Unix seconds."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            return datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError):
            pass
        seconds = None if _NUMBER.fullmatch(text.lower()) else seconds_of(text)
        now = time.time()
        if seconds is None or seconds >= now:
            self.fail(
                f"{value!r} is not an age or a date, such as 24h, 7d or 2026-11-20",
                param,
                ctx,
            )
        return now - seconds


_OWN_WORDS: Final = f"{__name__}.own_words"


class CommandAfterDashes(GroupedCommand):
    """Parse our own options up to ``--``; the rest is the user's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read our own options, and remember how the user wrote them."""
        # A shell completes a word of an unfinished line.
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        has_dashes = "--" in args
        if has_dashes:
            own = args[: args.index("--")]
        else:
            own = args
        # Help needs no command.
        if not {"-h", "--help"} & set(own):
            first = _first_other_word(self, ctx, own)
            if first is not None:
                fixed = shlex.join(["oomguard", "run", *own[:first], "--", *own[first:]])
                if has_dashes:
                    raise UsageError(
                        f"{own[first]!r} before -- is not an option",
                        hint="options: oomguard run --help",
                    )
                raise UsageError("-- is missing before the command", hint=fixed)
            if not has_dashes:
                raise UsageError(
                    "no command to run", hint="for example: oomguard run -- python script.py"
                )
        ctx.meta[_OWN_WORDS] = tuple(own)
        return super().parse_args(ctx, args)


def _first_other_word(
    command: click.Command, ctx: click.Context, words: Sequence[str]
) -> int | None:
    """Return the index of the first word that is neither an option nor its value; None without one.

    Raises:
        UsageError: if an option has no value.
    """
    valued: dict[str, click.Option] = {}
    names: set[str] = set()
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option):
            names.update(parameter.opts, parameter.secondary_opts)
            if not parameter.is_flag:
                valued.update(dict.fromkeys(parameter.opts, parameter))
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word in valued:
            value = words[index] if index < len(words) else None
            # A value with two dashes can still be given as --journal=--odd.
            if value is None or value.startswith("--") or value in names:
                kind = valued[word].metavar or valued[word].type.name.upper()
                raise UsageError(f"{word} needs a value", hint=f"{word} {kind}")
            index += 1
        elif not word.startswith("-"):
            return index - 1
    return None


def words_before_dashes() -> tuple[str, ...]:
    """Return the words before ``--`` of the current command, as the user wrote them."""
    return tuple(click.get_current_context().meta.get(_OWN_WORDS, ()))


F = TypeVar("F", bound=Callable[..., Any])
EFFECTS = click.Choice(list(map(str, Effect)))


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """Return an option that can also be given as OOMGUARD_<OPTION>.

    Args:
        names: its spellings.
        kwargs: the arguments of ``Option``, among them the ``group`` of the help page.
    """
    long = next(name for name in names if name.startswith("--")).split("/")[0].removeprefix("--")
    variable = f"OOMGUARD_{long.upper().replace('-', '_')}"
    return click.option(*names, cls=Option, envvar=variable, **kwargs)


def add_options(function: F, options: Sequence[Callable[[F], F]]) -> F:
    """Add options to a command, in the order of its help."""
    for decorate in reversed(options):
        function = decorate(function)
    return function


CHANGES: Final = "What may change"
LIMITS: Final = "Limits and time"
RECORDS: Final = "Records and metrics"
RERUN: Final = "Running again"


def policy_options(function: F) -> F:
    """Add the options --allow, --pin, --min and --rules."""
    allow = (
        "Highest effect that a change may have: output-preserving, reduces-capacity or "
        "changes-outputs."
    )
    by_default = "output-preserving, and reduces-capacity on settings that you did not set"
    return add_options(
        function,
        (
            option(
                "--allow",
                type=EFFECTS,
                metavar="EFFECT",
                help=allow,
                show_default=by_default,
                group=CHANGES,
                example="reduces-capacity",
            ),
            option(
                "--pin",
                "pinned",
                type=SettingName(),
                multiple=True,
                metavar="SETTING",
                help="Never change this setting (repeatable).",
                group=CHANGES,
                example="max_model_len",
            ),
            option(
                "--min",
                "floors",
                type=Assignment(),
                multiple=True,
                metavar="SETTING=VALUE",
                help="Never lower this setting below VALUE (repeatable).",
                group=CHANGES,
                example="max_model_len=8192",
            ),
            rules_option,
        ),
    )


def rules_option(function: F) -> F:
    """Add the option --rules."""
    return option(
        "--rules",
        multiple=True,
        type=click.Path(),
        metavar="DIR",
        help="Also use the rule files in this folder (repeatable).",
        group=ADVANCED,
        example="./rules",
    )(function)


def color_option(function: F) -> F:
    """Add the option --color."""
    kinds = click.Choice(["auto", "always", "never"])
    return option(
        "--color",
        type=kinds,
        default="auto",
        show_default=True,
        help="When to use color (respects NO_COLOR).",
        group=OUTPUT,
    )(function)


def output_options(function: F) -> F:
    """Add the options -q, -v and --color."""
    return add_options(
        function,
        (
            option("-q", "--quiet", is_flag=True, help="Print only error messages."),
            option("-v", "--verbose", is_flag=True, help="Print every event of oomguard."),
            color_option,
        ),
    )


_OLD_FORMS: Final = {"markdown": "md", "table": "terminal"}
# The first form is the default.
FORMS: Final = ("terminal", "json", "md")


class Form(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """Accept an output format; ``markdown`` and ``table`` are old names of two.

    One variable or table sets the format of all commands, but only ``diagnose`` writes every
    format. A command that lacks the format of a variable or file writes for the terminal.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the present name of the format."""
        form = str(_OLD_FORMS.get(value, value))
        if form not in self.choices and not _is_on_command_line(param, ctx):
            return str(self.choices[0])
        return str(super().convert(form, param, ctx))


def _is_on_command_line(param: click.Parameter | None, ctx: click.Context | None) -> bool:
    if param is None or param.name is None or ctx is None:
        return True
    return ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE


def format_option(what: str) -> Callable[[F], F]:
    """Add the option --format; ``what`` is the noun phrase of its help."""
    return option(
        "--format",
        "form",
        type=Form(FORMS),
        default=FORMS[0],
        show_default=True,
        help=f"Output format of {what}.",
        example="json",
    )


def read_policy(
    allow: str | None, pinned: Iterable[str], floors: Iterable[str], **limits: Any
) -> Policy:
    """Return the policy from its options.

    Raises:
        SettingError: if a setting is unknown.
    """
    return make_policy(allow, pinned, dict(map(parse_assignment, floors)), **limits)


def read_rules(folders: Iterable[str], *, check: bool = False) -> RuleSet:
    """Load the shipped rules and the rules in the given folders.

    Args:
        folders: folders of the user's own rule files.
        check: whether to compile every pattern too.

    Raises:
        RuleError: if a rule file cannot be used.
    """
    from oomguard.rules.rule_files import load_rules

    return load_rules(list(map(Path, folders)), check=check)


def report_configuration(
    ctx: click.Context, warn: Callable[[str], None], detail: Callable[[str], None]
) -> None:
    """Report the accepted and the rejected options of the configuration files.

    A command that is called on its own has read no file.
    """
    if isinstance(read := ctx.find_root().obj, Configuration):
        read.report(warn, detail)


def console_of(form: str, color: str) -> Console:
    """Return the console of a format that is not JSON: the terminal's, or one for Markdown."""
    if form == "md":
        from oomguard.report.markdown import markdown_console

        return markdown_console()
    return console(color)


def console(color: str, *, file: TextIO | None = None) -> Console:
    """Return a rich console that respects --color, NO_COLOR and the terminal's width."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            # rich calls this inside its handler; main() has an exit status for the error
            raise  # noqa: PLE0704

    # Bold and similar styles are escapes too, so this decides about more than colors.
    force_terminal = {"always": True, "never": False}.get(color)
    return _Console(file=file, force_terminal=force_terminal, highlight=False)


class JournalLocation(click.Path):  # type: ignore[type-arg, unused-ignore]
    """Accept a path, or the URL of a database for the journal."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        """Return the value as a location."""
        if isinstance(value, str):
            from oomguard.journal.location import parse_location

            return parse_location(value)
        location: Location = value
        return location


def journal_option(what: str) -> Callable[[F], F]:
    """Add the option --journal; ``what`` begins its help."""
    return option(
        "--journal",
        type=JournalLocation(),
        metavar="PATH|URL",
        help=f"{what}: a file, or a shared database postgresql://USER@HOST/DATABASE.",
        show_default="a file in your state folder",
        group=RECORDS,
        example="runs.db",
    )


class Count(click.IntRange):
    """Accept a whole number within limits."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            # click's own message does not name the limits.
            pass
        if self.max is None:
            rule = f"of at least {self.min}"
        else:
            rule = f"between {self.min} and {self.max}"
        return self.fail(f"{value!r} is not a whole number {rule}", param, ctx)


# Read options from files: the user's own file, and the working directory's pyproject.toml.
#
# The user's own file is ``oomguard/config.toml`` in the folder of XDG_CONFIG_HOME, and it may set
# any option. ``[tool.oomguard]`` of the nearest pyproject.toml may come from a stranger, so it can
# only restrict oomguard, and it never stops the command. Flags and OOMGUARD_* variables override
# both.

# Users start ``oomguard run`` in folders that they cloned or downloaded. Such a folder's
# ``[tool.oomguard]`` must not permit a change, name a file to write or a rule to trust, add
# attempts or time, hide a message, or stop the command.
# Sorted by how much may change. None is the default: reduced capacity only for settings that the
# user did not set.
_ALLOWED: Final = (
    str(Effect.OUTPUT_PRESERVING),
    None,
    str(Effect.REDUCES_CAPACITY),
    str(Effect.CHANGES_OUTPUTS),
)
# Times that may be shortened, each with its default.
_RESTRICTIONS_TIMES: Final = {"deadline": math.inf, "wait": 0.0}
_COUNTS: Final = {"max_attempts": DEFAULT_MAX_ATTEMPTS, "max_per_hour": DEFAULT_MAX_PER_HOUR}
# A command runs at least once.
_LEAST: Final = {"max_attempts": 1}
# Harmless output formats. html is not one of them, because it ends a --follow.
_LOOKS: Final = {
    "format": ("terminal", "json", "md", "markdown"),
    "color": ("auto", "always", "never"),
    "log_format": ("console", "json"),
}
# A stranger's file must not fill the memory or the screen.
_MAX_ENTRIES: Final = 256
# Limit of a name or value that is compared with known ones, or shown.
_MAX_CHARS: Final = 100


class Restrictions:
    """Read a stranger's table: accepted options go to ``taken``, others to ``left_out``."""

    def __init__(self, own: Mapping[str, Any], options: Collection[str]) -> None:
        self.taken: dict[str, Any] = {}
        self.left_out: list[tuple[str, str]] = []
        self._own = own
        self._options = options

    def read(self, table: Any) -> None:
        """Accept the permitted options of the table."""
        if not isinstance(table, dict):
            self._leave("", f"[tool.oomguard] is a {type(table).__name__}, not a table")
            return
        if len(table) > _MAX_ENTRIES:
            self._leave("", f"[tool.oomguard] has more than {_MAX_ENTRIES} options")
            return
        for key, value in table.items():
            self._option(key.replace("-", "_"), value)

    def _option(self, name: str, value: Any) -> None:
        # An old limit must not be lost: version 0.1 counted the attempts after the first.
        if name == "max_relaunches" and type(value) is int:
            self._option("max_attempts", value + 1)
        elif name not in self._options:
            self._leave(name[:_MAX_CHARS], f"unknown option, {suggest_option(name, self._options)}")
        elif name == "allow":
            self._allow(value)
        elif name in _COUNTS or name in _RESTRICTIONS_TIMES:
            self._at_most(name, value)
        elif name == "restart":
            self._restart(value)
        elif name == "pin":
            self._pins(value)
        elif name == "min":
            self._floors(value)
        elif name in {"dry_run", "verbose"}:
            self._switch(name, value)
        elif name in _LOOKS:
            self._look(name, value)
        else:
            self._leave(name, f"only a flag, OOMGUARD_{name.upper()} or your own file can set it")

    def _allow(self, value: Any) -> None:
        own = self._own.get("allow")
        if value not in _ALLOWED or value is None:
            self._leave("allow", f"must be one of {', '.join(filter(None, _ALLOWED))}")
        elif own in _ALLOWED and _ALLOWED.index(value) > _ALLOWED.index(own):
            self._leave(
                "allow",
                f"{value} allows more than {own or 'the default'}; only {_who('allow')} can",
            )
        else:
            self.taken["allow"] = value

    def _at_most(self, name: str, given: Any) -> None:
        whole = name in _COUNTS
        most = self._own.get(name, {**_COUNTS, **_RESTRICTIONS_TIMES}[name])
        is_short = not isinstance(given, str) or len(given) <= _MAX_CHARS
        if is_short and not whole:
            value = seconds_in(given)
        else:
            value = given
        if not isinstance(value, int if whole else (int, float)) or isinstance(value, bool):
            self._leave(
                name,
                "must be a whole number" if whole else "must be a time such as 30m or 90 (seconds)",
            )
        elif not _LEAST.get(name, 0) <= value <= _LONGEST_S:
            if whole and value > 0:
                of = f"more than {most}; only {_who(name)} can raise it"
            else:
                of = f"must be between {_LEAST.get(name, 0)} and {_LONGEST_S}"
            self._leave(name, of)
        elif value > most:
            self._leave(name, f"more than {most}; only {_who(name)} can raise it")
        else:
            self.taken[name] = value

    def _restart(self, value: Any) -> None:
        if value == "no":
            self.taken["restart"] = value
        else:
            self._leave("restart", f"must be no; only {_who('restart')} can allow restarts")

    def _pins(self, value: Any) -> None:
        pins = list(self._own.get("pin", ()))
        for entry in self._entries("pin", value):
            try:
                pins.append(pinned_name(entry if isinstance(entry, str) else ""))
            except SettingError:
                self._leave("pin", f"unknown setting {_restrictions_shown(entry)}")
        if pins:
            self.taken["pin"] = list(dict.fromkeys(pins))

    def _floors(self, value: Any) -> None:
        """Take the higher of two floors, because the table cannot lower the user's own."""
        floors: dict[str, tuple[FactValue, str]] = {}
        if isinstance(value, dict):
            given = [f"{key}={entry}" for key, entry in value.items()]
        else:
            given = value
        own = list(self._own.get("min", ()))
        for entry in [*own, *self._entries("min", given)]:
            if entry not in own and (not isinstance(entry, str) or len(entry) > _MAX_CHARS):
                self._leave("min", f"not SETTING=VALUE: {_restrictions_shown(entry)}")
                continue
            try:
                name, floor = parse_assignment(entry)
            except (OomguardError, ValueError, OverflowError) as error:
                self._leave("min", str(error))
                continue
            before = floors.get(name)
            if before is None or _is_higher(floor, before[0]):
                floors[name] = (floor, entry)
        if floors:
            self.taken["min"] = [entry for _, entry in floors.values()]

    def _switch(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            self._leave(name, "must be true or false")
        elif value:
            self.taken[name] = True
        elif self._own.get(name):
            self._leave(name, f"only {_who(name)} can turn it off")

    def _look(self, name: str, value: Any) -> None:
        if isinstance(value, str) and value in _LOOKS[name]:
            self.taken[name] = value
        else:
            self._leave(name, f"must be one of {', '.join(_LOOKS[name])}")

    def _entries(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, list):
            entries = value
        else:
            entries = [value]
        if len(entries) > _MAX_ENTRIES:
            self._leave(name, f"more than {_MAX_ENTRIES} entries")
            return []
        return entries

    def _leave(self, name: str, why: str) -> None:
        self.left_out.append((name, why))


_RENAMED: Final = {
    "max_relaunches": "write max_attempts, which also counts the first attempt",
}


def suggest_option(name: str, options: Collection[str]) -> str:
    """Suggest the option nearest to an unknown name, or list all options."""
    import difflib

    if name in _RENAMED:
        return _RENAMED[name]
    near = difflib.get_close_matches(name[:_MAX_CHARS], options, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"options: {', '.join(options)}"


def _who(name: str) -> str:
    return f"a flag, OOMGUARD_{name.upper()} or your own file"


def _is_higher(one: FactValue, other: FactValue) -> bool:
    return not isinstance(one, str) and not isinstance(other, str) and one > other


def _restrictions_shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)[:_MAX_CHARS]
    return type(value).__name__


OPTIONS: Final = (
    "allow",
    "pin",
    "min",
    "max_attempts",
    "max_per_hour",
    "deadline",
    "dry_run",
    "idempotent",
    "report",
    "metrics",
    "step_recovery",
    "snapshot",
    "journal",
    "reuse",
    "rules",
    "set",
    "gpu_memory",
    "format",
    "jobs",
    "follow",
    "output",
    "no_mask",
    "quiet",
    "verbose",
    "grace",
    "input",
    "pty",
    "exit_code",
    "color",
    "log_format",
    "gpus",
    "wait",
    "lease",
    "lease_folder",
    "restart",
    "hang_after",
    "host_reserve",
    "termination_message",
    "probes",
    "exit_status",
    "slurm_comment",
    "slurm_requeue",
    "rank",
    "world_size",
    "rendezvous",
    "rank_timeout",
)
# These options take a list, and a single value counts as a list of one.
_REPEATABLE: Final = frozenset({"pin", "min", "rules", "set"})


def _check_folder(path: str) -> None:
    """Check a folder of rules.

    Raises:
        SettingError: if there is no such folder.
    """
    if not Path(path).is_dir():
        raise SettingError(f"{path!r} is not a folder", hint="a folder of .toml files")


_CHECKS: Final[Mapping[str, Callable[[str], object]]] = {
    "pin": pinned_name,
    "min": parse_assignment,
    "rules": _check_folder,
}
_SWITCHES: Final = frozenset(
    {
        "dry_run",
        "idempotent",
        "pty",
        "quiet",
        "verbose",
        "exit_code",
        "follow",
        "no_mask",
        "reuse",
        "slurm_comment",
        "step_recovery",
    }
)
# Options with text that may be only a number.
_PORTS_AND_COUNTS: Final = frozenset({"gpus", "metrics", "probes"})
_NUMBERS: Final = frozenset({"max_attempts", "max_per_hour", "slurm_requeue", "rank", "world_size"})
_TIMES: Final = frozenset({"deadline", "grace", "wait", "hang_after", "rank_timeout"})
# Option -> parameter of the sub-commands, if Python already uses the option's name.
_PARAMETERS: Final = {
    "format": "form",
    "input": "input_file",
    "min": "floors",
    "pin": "pinned",
    "set": "given",
}
_TABLE: Final = "[tool.oomguard]"
# The spellings of the table in TOML: one header, or ``tool`` alone with ``oomguard`` below it.
_MAY_HOLD_TABLE: Final = (
    rb"(?m)tool[\"'\t ]*\.[\"'\t ]*oomguard|^[\t ]*\[?[\t ]*[\"']?tool[\"']?[\t ]*[\]=]"
)
# Limits for a stranger's file. tomllib needs time and memory that grow with the square of the
# number of dots in a key.
_MAX_BYTES: Final = 256 * 1024
# Each dot of a key nests one more table, and the stack is limited.
_MAX_DOTS_A_LINE: Final = 200
# More lines would hide the command's own output.
_MAX_REPORTED: Final = 10


class OptionsFile(NamedTuple):
    """Hold the options of one file; ``left_out`` holds rejected options with the reasons."""

    place: str
    taken: Mapping[str, Any] = MappingProxyType({})
    left_out: tuple[tuple[str, str], ...] = ()


class Configuration(NamedTuple):
    """Hold the options of all files, by parameter name, and each file that was read."""

    options: Mapping[str, Any] = MappingProxyType({})
    files: tuple[OptionsFile, ...] = ()

    def report(self, warn: Callable[[str], None], detail: Callable[[str], None]) -> None:
        """Report rejected options to ``warn``, and each file's accepted options to ``detail``."""
        for file in self.files:
            taken = " ".join(f"{option}={_shown(value)}" for option, value in file.taken.items())
            detail(_line(f"options of {file.place}: {taken or 'none'}"))
            for option, why in file.left_out[:_MAX_REPORTED]:
                warn(_line(f"{file.place}: ignored {f'{option}: ' if option else ''}{why}"))
            if len(file.left_out) > _MAX_REPORTED:
                warn(_line(f"{file.place}: ignored {len(file.left_out) - _MAX_REPORTED} more"))


def read_configuration(start: Path | None = None) -> Configuration:
    """Read both files.

    Args:
        start: where the search for pyproject.toml begins, upwards; None for the working directory.

    Raises:
        UsageError: if the user's own file has an unknown option or a wrong value.
    """
    own = _own_options()
    project = _project_options(start, own.taken if own else {})
    if own:
        options = dict(own.taken)
    else:
        options = {}
    options |= project.taken if project else {}
    files = tuple(filter(None, (own, project)))
    return Configuration(
        {_PARAMETERS.get(name, name): value for name, value in options.items()}, files
    )


def source_of(option: str, words: Sequence[str]) -> str | None:
    """Return which variable or file sets an option, such as ``"OOMGUARD_PIN"``.

    None if a flag or nothing sets it.

    Args:
        option: its name, with hyphens or underscores.
        words: the words of the command line.
    """
    name = option.replace("-", "_")
    flag_name = name.replace("_", "-")
    variable = f"OOMGUARD_{name.upper()}"
    for word in words:
        if word == "--":
            break
        if word.startswith("--") and word[2:].partition("=")[0] == flag_name:
            return None
    if os.environ.get(variable):
        return variable
    for file in reversed(read_configuration().files):
        if name in file.taken:
            return f"{file.place}: {name}"
    return None


def own_file() -> Path:
    """Return the path of the user's own options.

    A relative XDG_CONFIG_HOME is ignored, because it would mean the working directory.
    """
    named = os.environ.get("XDG_CONFIG_HOME", "")
    if named and not Path(named).is_absolute():
        folder = Path.home() / ".config" / "oomguard"
    else:
        folder = None
    return (folder or user_folder("config")) / "config.toml"


def _own_options() -> OptionsFile | None:
    path = own_file()
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        # Loaded here, because most users have no such file.
        import tomllib

        table = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # Many containers change the user but keep HOME, so the folder may be another user's.
        if not os.access(path.parent, os.X_OK):
            return None
        raise UsageError(
            f"{path}: {error.strerror}", hint="oomguard reads your own options from this file"
        ) from None
    except (ValueError, RecursionError) as error:
        why = "the file is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(
            f"{path}: {why}", hint="oomguard reads your own options from this file"
        ) from None
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UsageError(f"{path}: unknown option {key!r}", hint=suggest_option(name, OPTIONS))
        values[name] = _value(name, value, path)
    return OptionsFile(str(path), values)


def _project_options(start: Path | None, own: Mapping[str, Any]) -> OptionsFile | None:
    """Return the options of the nearest table; None if there is none. Never raises."""
    place = "pyproject.toml"
    try:
        folder = start or Path.cwd()
    except OSError:
        # The working directory no longer exists.
        return None
    try:
        for parent in (folder, *folder.parents):
            path = parent / "pyproject.toml"
            place = str(path)
            table = _table(path)
            if table is not None:
                restrictions = Restrictions(own, OPTIONS)
                restrictions.read(table)
                return OptionsFile(
                    f"{place}, {_TABLE}", restrictions.taken, tuple(restrictions.left_out)
                )
    except Exception as error:  # noqa: BLE001
        # A stranger wrote the file, so no content of it may stop the user's command.
        why = str(error)[:200] or type(error).__name__
        return OptionsFile(f"{place}, {_TABLE}", {}, (("", f"oomguard cannot read it: {why}"),))
    return None


def _table(path: Path) -> Any:
    """Return the table of a stranger's file; None if it has none.

    Raises:
        ValueError: if the file is not safe to read.
    """
    try:
        if not path.exists():
            return None
        # Opening a pipe would wait for a writer.
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError:
        return None
    if b"oomguard" not in content:
        return None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"the file is larger than {_MAX_BYTES // 1024} KiB")
    # A file that only lists oomguard as a dependency is not worth loading a TOML parser.
    if not re.search(_MAY_HOLD_TABLE, content):
        return None
    if any(line.count(b".") > _MAX_DOTS_A_LINE for line in content.splitlines()):
        raise ValueError(f"a line has more than {_MAX_DOTS_A_LINE} dots")
    import tomllib

    tool = tomllib.loads(content.decode("utf-8")).get("tool")
    if isinstance(tool, dict):
        return tool.get("oomguard")
    return None


def _value(name: str, value: Any, path: Path) -> Any:
    """Return a value as the command line would: a list for a repeatable option."""
    if name in _REPEATABLE:
        if isinstance(value, dict):
            entries = [f"{key}={entry}" for key, entry in value.items()]
        elif isinstance(value, list):
            entries = list(map(str, value))
        else:
            entries = [str(value)]
        check = _CHECKS.get(name, str)
        try:
            for entry in entries:
                check(entry)
        except SettingError as error:
            raise UsageError(f"{path}: {name}: {error}", hint=error.hint) from None
        return entries
    if name in _TIMES:
        seconds = seconds_in(value)
        if seconds is None:
            raise UsageError(
                f"{path}: {name} must be a time such as 30m, 1h30m or 90 (seconds), not {value!r}"
            )
        return seconds
    if name in _PORTS_AND_COUNTS and type(value) is int:
        return str(value)
    if name in _SWITCHES:
        wanted: type = bool
        kind = "true or false"
    elif name in _NUMBERS:
        wanted = int
        kind = "a whole number"
    else:
        wanted = str
        kind = "text"
    if type(value) is not wanted:
        raise UsageError(f"{path}: {name} must be {kind}, not {value!r}")
    return value


def _shown(value: object) -> str:
    """Return a value without the password in a URL."""
    if "://" not in str(value):
        return str(value)
    from oomguard.core.redact import mask

    return mask(str(value))


def _line(text: str) -> str:
    return strip_escapes(text).encode("utf-8", "replace").decode()
