"""Let optional packages follow the attempts of a run, and choose their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from oomguard.analyst.link import LiveOutput
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
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


class DeviceAssignment(Protocol):
    """Choose the devices of one run, attempt by attempt."""

    def placed(self, launch: Launch, stopped: Callable[[], bool], left_s: float) -> Launch:
        """Return the launch of the next attempt, with its devices in its variables.

        It may wait until ``stopped``, and at most ``left_s`` seconds.

        Raises:
            OomguardError: if no device is free.
        """

    def watching(self, recording: LiveOutput) -> AbstractContextManager[object]:
        """Return a context for the running attempt.

        Its output shows when others may start on its devices.
        """

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with another device as its first action.

        That applies if a neighbor is the cause and another device has enough memory.
        """

    def once_free(self, incident: Incident, stopped: Callable[[], bool], left_s: float) -> Incident:
        """Wait, as ``placed`` may, until a failure's neighbors free memory, if the user allows it.

        The returned incident then has the device in its plan.
        """

    def devices(self) -> Collection[int] | None:
        """Return the GPUs of the next attempt by index; None if it may use any."""


class NoPlacement:
    """Leave the devices to the user's variables."""

    def placed(self, launch: Launch, _stopped: Callable[[], bool], _left_s: float) -> Launch:
        """Return the launch unchanged."""
        return launch

    def watching(self, _recording: LiveOutput) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis unchanged."""
        return diagnosis

    def devices(self) -> None:
        """Return None, because any device may be used."""
        return

    def once_free(
        self, incident: Incident, _stopped: Callable[[], bool], _left_s: float
    ) -> Incident:
        """Return the incident unchanged."""
        return incident
