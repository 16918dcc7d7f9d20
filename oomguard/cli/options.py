"""The options that several sub-commands share, and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from oomguard.core.incident import Effect
from oomguard.core.setting_spellings import parse_assignment
from oomguard.journal.location import Location, parse_location
from oomguard.remedy.policy import Policy, make_policy

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.rules.rule_files import RuleSet


F = TypeVar("F", bound=Callable[..., Any])
EFFECTS = click.Choice([str(effect) for effect in Effect])


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """Return a click option that can also be given as OOMGUARD_<OPTION>."""
    long = next(name for name in names if name.startswith("--")).split("/")[0].removeprefix("--")
    return click.option(*names, envvar=f"OOMGUARD_{long.upper().replace('-', '_')}", **kwargs)


def decorated(function: F, options: Sequence[Callable[[F], F]]) -> F:
    """Add options to a command, in the order in which its help lists them."""
    for decorate in reversed(options):
        function = decorate(function)
    return function


def policy_options(function: F) -> F:
    """Add --allow, --pin, --min and --rules."""
    allow = (
        "Highest effect a patch may have, on any setting. "
        "[default: output-preserving, and reduces-capacity on settings you left alone]"
    )
    floors = "Never go below this value. Repeatable."
    return decorated(
        function,
        (
            option("--allow", type=EFFECTS, help=allow),
            option(
                "--pin",
                "pinned",
                multiple=True,
                metavar="SETTING",
                help="Never touch this setting. Repeatable.",
            ),
            option("--min", "floors", multiple=True, metavar="SETTING=VALUE", help=floors),
            rules_option,
        ),
    )


def rules_option(function: F) -> F:
    """Add --rules."""
    what = "A folder of your own rule files. Repeatable."
    return option("--rules", multiple=True, type=click.Path(), metavar="DIR", help=what)(function)


def color_option(function: F) -> F:
    """Add --color."""
    kinds = click.Choice(["auto", "always", "never"])
    return option("--color", type=kinds, default="auto", help="Colour. NO_COLOR is respected.")(
        function
    )


def output_options(function: F) -> F:
    """Add -q, -v and --color."""
    return decorated(
        function,
        (
            option("-q", "--quiet", is_flag=True, help="Print only errors."),
            option("-v", "--verbose", is_flag=True, help="Print every event."),
            color_option,
        ),
    )


def read_policy(
    allow: str | None, pinned: Iterable[str], floors: Iterable[str], **limits: Any
) -> Policy:
    """Read the policy from its options; raises SettingError for an unknown setting."""
    return make_policy(allow, pinned, dict(parse_assignment(text) for text in floors), **limits)


def read_rules(folders: Iterable[str], *, check: bool = False) -> RuleSet:
    """Load the shipped rules and those in the folders given; raises RuleError. ``check`` also
    compiles every pattern.
    """
    from oomguard.rules.rule_files import load_rules

    return load_rules([Path(folder) for folder in folders], check=check)


def tell_configuration(
    ctx: click.Context, warn: Callable[[str], None], detail: Callable[[str], None]
) -> None:
    """Say what was read of the files of options, and what was left out and why; a command called by
    itself read none.
    """
    from oomguard.cli.config import Configuration

    if isinstance(read := ctx.find_root().obj, Configuration):
        read.tell(warn, detail)


def form_of(ctx: click.Context, form: str, forms: Sequence[str]) -> str:
    """Return the output form asked for, the first of ``forms`` where a variable or table asks for
    one that is not among them.

    One variable or table sets the form of all commands, and not all have the same. Raises
    BadParameter for the command line's own.
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
            # it is called where the error is caught: the program's end has a status for it
            raise  # noqa: PLE0704

    return _Console(
        file=file,
        force_terminal={"always": True, "never": False}.get(
            color
        ),  # bold and its like are escapes too
        highlight=False,
    )


# ``--journal PATH|URL``: a file, or a database that a team shares.


class JournalPlace(click.Path):  # type: ignore[type-arg, unused-ignore]
    """A path, or the URL of a database that a journal can be kept in."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Location:
        """Return it as a place."""
        if isinstance(value, str):
            return parse_location(value)
        place: Location = value
        return place


def journal_option(what: str) -> Callable[[F], F]:
    """Add --journal; ``what`` begins its help."""
    told = (
        f"{what}: a file, or a database that a team shares, postgresql://USER@HOST/DATABASE. "
        "[default: the user's state folder]"
    )
    return option("--journal", type=JournalPlace(), metavar="PATH|URL", help=told)
