"""What goes along with a run: told of each attempt, it shows or counts, and whatever it raises
stays its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from oomguard.core.incident import Attempt, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch


class Companion(Protocol):
    """Goes along with the attempts of one run. It is called between them, so it must not wait."""

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Hear that an attempt has started its command, whose process is ``pid``."""

    def ended(self, attempt: Attempt) -> None:
        """Hear how it ended."""


@runtime_checkable
class Forewarned(Protocol):
    """A companion that also hears before the command starts: what it sets in our environment, the
    command inherits.
    """

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Hear that an attempt is about to start its command, and what is new in it."""


@dataclass(frozen=True, slots=True)
class Companions:
    """All that go along with one run."""

    of_run: tuple[Companion, ...] = ()

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Tell those who asked for it that an attempt is about to start its command."""
        for companion in self.of_run:
            if isinstance(companion, Forewarned):
                _told(partial(companion.begins, number, patches))

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Tell all that an attempt has started its command."""
        for companion in self.of_run:
            _told(partial(companion.began, number, launch, pid))

    def ended(self, attempt: Attempt) -> None:
        """Tell all how it ended."""
        for companion in self.of_run:
            _told(partial(companion.ended, attempt))


def _told(tell: Callable[[], None]) -> None:
    try:
        tell()
    except Exception as error:  # noqa: BLE001 - the run goes on, whatever a listener meets
        get_logger().warning(
            "what goes along with the run failed", reason=f"{type(error).__name__}: {error}"
        )
