"""Call the hooks of a run before, at and after each attempt; their errors stay their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from oomguard.core.incident import Attempt, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch


class AttemptHook(Protocol):
    """Follow the attempts of one run. Hooks are called between attempts, so they must not wait."""

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Handle that an attempt has started its command, whose process is ``pid``."""

    def ended(self, attempt: Attempt) -> None:
        """Handle the end of an attempt."""


@runtime_checkable
class PreStartHook(Protocol):
    """Follow attempts and also run before the command starts.

    The command inherits changes of the environment that such a hook makes.
    """

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Handle that an attempt is about to start its command, with its new patches."""


@dataclass(frozen=True, slots=True)
class AttemptHooks:
    """Call all hooks of one run."""

    of_run: tuple[AttemptHook, ...] = ()

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Call the early hooks before an attempt starts its command."""
        for companion in self.of_run:
            if isinstance(companion, PreStartHook):
                _call(partial(companion.begins, number, patches))

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Call all hooks after an attempt has started its command."""
        for companion in self.of_run:
            _call(partial(companion.began, number, launch, pid))

    def ended(self, attempt: Attempt) -> None:
        """Call all hooks after an attempt has ended."""
        for companion in self.of_run:
            _call(partial(companion.ended, attempt))


def _call(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception as error:  # noqa: BLE001 - an error of a hook must not stop the run
        get_logger().warning(
            "A part of oomguard that follows the run failed; the command continues",
            reason=f"{type(error).__name__}: {error}",
        )
