"""Where the attempts of a run run: as the user's variables say, unless ``--gpus`` has
them placed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from oomguard.analyst.link import LiveOutput
from oomguard.core.incident import Diagnosis, Incident
from oomguard.engines.command import Launch


class DeviceAssignment(Protocol):
    """Decides about the devices of one run, attempt by attempt."""

    def placed(self, launch: Launch, stopped: Callable[[], bool], left_s: float) -> Launch:
        """Return the launch of the attempt that begins with its devices in its variables.

        It may wait, until ``stopped`` and for ``left_s`` seconds at most.

        Raises:
            OomguardError: there is no device for it.
        """

    def watching(self, recording: LiveOutput) -> AbstractContextManager[object]:
        """Return what is entered while the attempt runs: its output tells when others may start on
        its devices.
        """

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis of a failure with another device as its first remedy, where a
        neighbour is the cause and one has room.
        """

    def once_free(self, incident: Incident, stopped: Callable[[], bool], left_s: float) -> Incident:
        """Wait as ``placed`` may until such a failure's neighbours leave room, where that was asked
        for.

        Return it with the device in its plan then.
        """

    def devices(self) -> Collection[int] | None:
        """Return the GPUs of the attempt that is next, by index; None where it may use any."""


class AsGiven:
    """Leaves all of it to the user's variables."""

    def placed(self, launch: Launch, _stopped: Callable[[], bool], _left_s: float) -> Launch:
        """Return the launch as it is."""
        return launch

    def watching(self, _recording: LiveOutput) -> AbstractContextManager[object]:
        """Return nothing to enter."""
        return nullcontext()

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis as it is."""
        return diagnosis

    def devices(self) -> None:
        """Return None."""
        return

    def once_free(
        self, incident: Incident, _stopped: Callable[[], bool], _left_s: float
    ) -> Incident:
        """Return the incident as it is."""
        return incident
