"""Define the options that several sub-commands share, and read their values."""

from __future__ import annotations

import contextlib
import datetime
import re
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

import click

from oomguard.core.errors import SettingError, UsageError
from oomguard.core.facts import parse_size
from oomguard.core.incident import Effect
from oomguard.core.setting_spellings import parse_assignment
from oomguard.journal.location import Location, parse_location
from oomguard.remedy.policy import Policy, make_policy

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.rules.rule_files import RuleSet


# Every option with a time accepts ``90`` (seconds), ``30m``, ``1h30m`` or ``1d2h``.
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PARTS: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+")
_PART: Final = re.compile(r"([0-9.]+)([smhdw])")
_NUMBER: Final = re.compile(r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3})?|\.[0-9]+")
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
                f"{value!r} is not a time before now: write 90m, 12h, 7d, 2w or 1d12h", param, ctx
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
                f"{value!r} is not a moment: write 24h, 7d, 2026-11-20 or 2026-11-20T14:00",
                param,
                ctx,
            )
        return now - seconds


_OWN_WORDS: Final = f"{__name__}.own_words"


class CommandAfterDashes(click.Command):
    """Parse our own options up to ``--``; the rest is the user's command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read our own options, and remember how the user wrote them."""
        if "--" in args:
            own = args[: args.index("--")]
        else:
            own = args
        if "--" not in args and not {"-h", "--help"} & set(args):
            first = next(
                (
                    i
                    for i, word in enumerate(own)
                    if not word.startswith("-") and not _is_value(self, ctx, own, i)
                ),
                None,
            )
            if first is not None:
                fixed = shlex.join(["oomguard", "run", *own[:first], "--", *own[first:]])
                raise UsageError("-- is missing before the command", hint=fixed)
            raise UsageError("no command to run", hint="oomguard run -- python script.py")
        ctx.meta[_OWN_WORDS] = tuple(own)
        return super().parse_args(ctx, args)


def _is_value(command: click.Command, ctx: click.Context, args: list[str], index: int) -> bool:
    """Return whether the word at ``index`` is the value of the option before it."""
    if index:
        before = args[index - 1]
    else:
        before = ""
    return any(
        before in p.opts and isinstance(p, click.Option) and not p.is_flag
        for p in command.get_params(ctx)
    )


def words_before_dashes() -> tuple[str, ...]:
    """Return the words before ``--`` of the current command, as the user wrote them."""
    return tuple(click.get_current_context().meta.get(_OWN_WORDS, ()))


F = TypeVar("F", bound=Callable[..., Any])
EFFECTS = click.Choice([str(effect) for effect in Effect])


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """Return a click option that can also be given as OOMGUARD_<OPTION>."""
    long = next(name for name in names if name.startswith("--")).split("/")[0].removeprefix("--")
    return click.option(*names, envvar=f"OOMGUARD_{long.upper().replace('-', '_')}", **kwargs)


def add_options(function: F, options: Sequence[Callable[[F], F]]) -> F:
    """Add options to a command, in the order of its help."""
    for decorate in reversed(options):
        function = decorate(function)
    return function


def policy_options(function: F) -> F:
    """Add the options --allow, --pin, --min and --rules."""
    allow = (
        "Highest effect that a change may have, on any setting. [default: output-preserving, and "
        "reduces-capacity on settings that you did not set]"
    )
    floors = "Never lower SETTING below VALUE. Repeatable."
    return add_options(
        function,
        (
            option("--allow", type=EFFECTS, help=allow),
            option(
                "--pin",
                "pinned",
                multiple=True,
                metavar="SETTING",
                help="Never change this setting. Repeatable.",
            ),
            option("--min", "floors", multiple=True, metavar="SETTING=VALUE", help=floors),
            rules_option,
        ),
    )


def rules_option(function: F) -> F:
    """Add the option --rules."""
    what = "Folder with your own rule files. Repeatable."
    return option("--rules", multiple=True, type=click.Path(), metavar="DIR", help=what)(function)


def color_option(function: F) -> F:
    """Add the option --color."""
    kinds = click.Choice(["auto", "always", "never"])
    return option(
        "--color",
        type=kinds,
        default="auto",
        help="When to use color (respects NO_COLOR). [default: auto]",
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


def read_policy(
    allow: str | None, pinned: Iterable[str], floors: Iterable[str], **limits: Any
) -> Policy:
    """Return the policy from its options.

    Raises:
        SettingError: if a setting is unknown.
    """
    return make_policy(allow, pinned, dict(parse_assignment(text) for text in floors), **limits)


def read_rules(folders: Iterable[str], *, check: bool = False) -> RuleSet:
    """Load the shipped rules and the rules in the given folders.

    Args:
        folders: folders of the user's own rule files.
        check: whether to compile every pattern too.

    Raises:
        RuleError: if a rule file cannot be used.
    """
    from oomguard.rules.rule_files import load_rules

    return load_rules([Path(folder) for folder in folders], check=check)


def report_configuration(
    ctx: click.Context, warn: Callable[[str], None], detail: Callable[[str], None]
) -> None:
    """Report the accepted and the rejected options of the configuration files.

    A command that is called on its own has read no file.
    """
    from oomguard.cli.config import Configuration

    if isinstance(read := ctx.find_root().obj, Configuration):
        read.report(warn, detail)


def form_of(ctx: click.Context, form: str, forms: Sequence[str]) -> str:
    """Return the output format; the first of ``forms`` if a variable asks for another one.

    One variable or table sets the format of all commands, but not all commands have every format.

    Raises:
        BadParameter: if the command line itself asks for an unknown format.
    """
    if form in forms:
        return form
    if ctx.get_parameter_source("form") is click.core.ParameterSource.COMMANDLINE:
        example = f"{ctx.command_path} --format json"
        raise click.BadParameter(
            f"{form!r} is not one of {', '.join(forms)}; use {example}", param_hint="--format"
        )
    return forms[0]


def console(color: str, *, file: TextIO | None = None) -> Console:
    """Return a rich console that respects --color, NO_COLOR and the terminal's width."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            # rich calls this inside its handler; main() has an exit status for the error
            raise  # noqa: PLE0704

    return _Console(
        file=file,
        force_terminal={"always": True, "never": False}.get(
            color
        ),  # bold and similar styles are escapes too
        highlight=False,
    )


class JournalLocation(click.Path):  # type: ignore[type-arg, unused-ignore]
    """Accept a path, or the URL of a database for the journal."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        """Return the value as a location."""
        if isinstance(value, str):
            return parse_location(value)
        location: Location = value
        return location


def journal_option(what: str) -> Callable[[F], F]:
    """Add the option --journal; ``what`` begins its help."""
    text = (
        f"{what}: a file, or a shared database postgresql://USER@HOST/DATABASE. "
        "[default: a file in your state folder]"
    )
    return option("--journal", type=JournalLocation(), metavar="PATH|URL", help=text)
