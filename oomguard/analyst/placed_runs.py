"""Define how the attempts of a run get their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from oomguard.analyst.link import LiveOutput
from oomguard.core.incident import Diagnosis, Incident
from oomguard.engines.command import Launch


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
