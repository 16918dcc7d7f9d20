"""The options that several sub-commands share, and their reading into a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from oomguard.facts import parse_size
from oomguard.incident import Effect
from oomguard.remedy.policy import Policy, make_policy
from oomguard.remedy.settings import parse_assignment

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.rules.load import RuleSet

F = TypeVar("F", bound=Callable[..., Any])
EFFECTS = click.Choice([str(effect) for effect in Effect])


def option(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """A click option that can also be given as OOMGUARD_<OPTION>."""
    long = next(name for name in names if name.startswith("--")).split("/")[0].removeprefix("--")
    return click.option(*names, envvar=f"OOMGUARD_{long.upper().replace('-', '_')}", **kwargs)


def policy_options(function: F) -> F:
    """--allow, --pin, --min and --rules."""
    for decorate in reversed((
        option("--allow", type=EFFECTS, help=(
            "Highest effect a patch may have, on any setting. "
            "[default: output-preserving, and reduces-capacity on settings you left alone]"
        )),
        option("--pin", multiple=True, metavar="SETTING", help="Never touch this setting. Repeatable."),
        option("--min", "minimum", multiple=True, metavar="SETTING=VALUE", help="Never go below this value. Repeatable."),
        option("--rules", multiple=True, type=click.Path(), metavar="DIR", help="A folder of your own rule files. Repeatable."),
    )):  # fmt: skip
        function = decorate(function)
    return function


def color_option(function: F) -> F:
    """--color."""
    kinds = click.Choice(["auto", "always", "never"])
    return option("--color", type=kinds, default="auto", help="Colour. NO_COLOR is respected.")(function)


def output_options(function: F) -> F:
    """-q, -v and --color."""
    for decorate in reversed(
        (
            option("-q", "--quiet", is_flag=True, help="Print only errors."),
            option("-v", "--verbose", is_flag=True, help="Print every event."),
            color_option,
        )
    ):
        function = decorate(function)
    return function


def read_policy(allow: str | None, pin: Iterable[str], minimum: Iterable[str], **limits: Any) -> Policy:
    """The policy that the options say; raises SettingError for an unknown setting."""
    return make_policy(allow, pin, dict(parse_assignment(text) for text in minimum), **limits)


def read_rules(folders: Iterable[str], *, check: bool = False) -> RuleSet:
    """The shipped rules and the folders given, with ``check`` every pattern of them compiled; raises RuleError."""
    from oomguard.rules.load import load_rules

    return load_rules([Path(folder) for folder in folders], check=check)


def console(color: str, *, file: TextIO | None = None) -> Console:
    """A rich console that respects --color, NO_COLOR and the terminal's width."""
    from rich.console import Console

    return Console(
        file=file,
        force_terminal=True if color == "always" else None,
        no_color=True if color == "never" else None,
        highlight=False,
    )


def size_bytes(text: str | None) -> int | None:
    """The bytes of an optional size such as 24GiB; raises SettingError."""
    return None if text is None else parse_size(text).bytes
