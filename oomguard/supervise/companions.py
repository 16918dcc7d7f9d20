"""What goes along with a run: told of each attempt, it shows or counts, and whatever it raises stays its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from oomguard.engines.command import Launch
from oomguard.incident import Attempt
from oomguard.log import get_logger


class Companion(Protocol):
    """Goes along with the attempts of one run. It is called between them, so it must not wait."""

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Hear that an attempt has started its command, whose process is ``pid``."""

    def ended(self, attempt: Attempt) -> None:
        """Hear how it ended."""


@dataclass(frozen=True, slots=True)
class Companions:
    """All that go along with one run."""

    of_run: tuple[Companion, ...] = ()

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
        get_logger().warning("what goes along with the run failed", reason=f"{type(error).__name__}: {error}")
