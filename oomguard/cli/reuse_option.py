"""``run --reuse``: begin with what the journal knows to work; off unless asked, since a journal never changes a first attempt by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from oomguard.cli.options import option

if TYPE_CHECKING:
    from oomguard.engines.command import Launch
    from oomguard.incident import Patch
    from oomguard.journal.location import Location
    from oomguard.remedy.policy import Policy

# How long the command's start waits for others that hold the journal locked, or for each answer of a database; after it nothing is reused.
_BUSY_S: Final = 1.0
F = TypeVar("F", bound=Callable[..., Any])


def reuse_option(function: F) -> F:
    """Add --reuse."""
    what = (
        "Begin with the changes under which this command ran last with the same model, engine version and device. The journal tells them, "
        "--allow, --pin and --min hold."
    )
    return option("--reuse", is_flag=True, help=what)(function)


def reused(launch: Launch, policy: Policy, place: Location | None, *, reuse: bool) -> tuple[Patch, ...]:
    """Return the changes that the first attempt begins with; none unless ``reuse`` asks for them."""
    if not reuse:
        return ()
    from oomguard.journal.read import open_journal
    from oomguard.supervise.reusing import known_changes

    if isinstance(place, Path) and not place.exists():  # this run makes it
        return known_changes(launch, policy, lambda: nullcontext(None))
    return known_changes(launch, policy, lambda: open_journal(place, busy_s=_BUSY_S))
