"""``--journal PATH|URL``: a file, or a database that a team shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from oomguard.cli.options import option
from oomguard.journal.location import Location, parse_location

F = TypeVar("F", bound=Callable[..., Any])


class JournalPlace(click.Path):  # type: ignore[type-arg, unused-ignore]
    """A path, or the URL of a database that a journal can be kept in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:  # type: ignore[override]
        """Return it as a place."""
        return parse_location(value) if isinstance(value, str) else value


def journal_option(what: str) -> Callable[[F], F]:
    """Add --journal; ``what`` begins its help."""
    told = f"{what}: a file, or a database that a team shares, postgresql://USER@HOST/DATABASE. [default: the user's state folder]"
    return option("--journal", type=JournalPlace(), metavar="PATH|URL", help=told)
