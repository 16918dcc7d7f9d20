"""Run attempts on devices with enough room, and hold their leases."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePath
from typing import Final, Literal

from oomguard.analyst.attempt_settings import DEVICE
from oomguard.analyst.link import LiveOutput
from oomguard.cluster.placement.devices import VISIBLE
from oomguard.cluster.placement.need import AssignedDevices, DeviceNeed, need_of
from oomguard.cluster.placement.placer import Placer
from oomguard.cluster.placement.refusal import Invocation
from oomguard.core.errors import PlacementError, UsageError
from oomguard.core.incident import Diagnosis, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.settings import as_env
from oomguard.diagnosis import replanned
from oomguard.engines.command import Launch
from oomguard.engines.devices import started_words
from oomguard.engines.registry import launcher_of
from oomguard.engines.unwrap_command import inner_commands

# Programs that start a command elsewhere, with other variables.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("docker", "podman", "nerdctl"),
        "name the devices to the container (docker run --gpus '\"device=UUID\"'), or run oomguard "
        "inside it",
    ),
    "ssh": "it uses the devices of another machine. Run oomguard there "
    "(ssh HOST oomguard run --gpus auto -- …)",
    "kubectl": "it uses the devices of the pod. Run oomguard inside the pod",
}


def refuse_own_variable(argv: Sequence[str], own: Invocation) -> None:
    """Raise UsageError if the command sets CUDA_VISIBLE_DEVICES itself.

    Its own value would override the devices that oomguard chose.
    """
    for inner in inner_commands(argv):
        value = inner.variables.get(VISIBLE)
        if value is not None:
            raise UsageError(
                f"the command sets {VISIBLE}={value} itself, which would override the devices of "
                "--gpus",
                hint=(
                    "remove it from the command; to limit the choice, put it in front: "
                    f"{VISIBLE}={shlex.quote(value)} {own.line(command='…')}"
                ),
            )


def why_not_reached(argv: Sequence[str]) -> str | None:
    """Return why the variables do not reach the program, or None if they seem to."""
    name = PurePath(argv[0]).name
    if name in _ELSEWHERE:
        return f"{name} does not pass on variables: {_ELSEWHERE[name]}"
    if any(inner.has_no_others for inner in inner_commands(argv)):
        return "a wrapper in the command removes inherited variables"
    return None


POLL_S: Final = 0.25


class OutputWatcher:
    """Watch a command's output in a thread until some words have appeared often enough.

    Args:
        recording: the output.
        words: the words to find.
        times: how often they must appear.
        then: the function to call once, in the thread.
    """

    def __init__(
        self, recording: LiveOutput, words: bytes, times: int, then: Callable[[], None]
    ) -> None:
        self._recording = recording
        self._words = words
        self._left = times
        self._then = then
        self._stopped = threading.Event()
        self._came = 0
        self._place = (0, 0)
        self._seam = b""
        self._thread = threading.Thread(target=self._run, name="oomguard-live-words", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            came = self._recording.came
            if came == self._came:
                continue
            self._came = came
            new, self._place = self._recording.new_since(self._place)
            text = self._seam + new
            self._left -= text.count(self._words)
            # The rest is shorter than the words, so no occurrence is counted twice.
            self._seam = text[max(0, len(text) - len(self._words) + 1) :]
            if self._left <= 0:
                self._then()
                return


_NEIGHBOUR: Final = "colocated_process"
# An engine reports these before it has taken any memory.
_CAME_SINCE: Final = ("startup_free_memory_below_utilization", "utilization_too_high")
# A later attempt belongs to a job that has begun. If other processes hold every device, it waits
# this long even without --wait.
RELAUNCH_WAIT_S: Final = 60.0


@dataclass(slots=True)
class RunPlacement:
    """Place the attempts of one run; implements ``DeviceAssignment``.

    Attributes:
        placer: finds and leases devices.
        until: when leases end: ``start`` if the log shows the engine's start, or ``job``.
        wait_s: the longest wait for a device in seconds. None: do not wait.
        pinned: whether the user forbids another device.
    """

    placer: Placer
    until: Literal["start", "job"]
    wait_s: float | None
    pinned: bool = False
    _taken: AssignedDevices | None = field(init=False, default=None)
    _next: AssignedDevices | None = field(init=False, default=None)
    _needs: dict[tuple[str, ...], DeviceNeed] = field(init=False, default_factory=dict)
    _argv: tuple[str, ...] = field(init=False, default=())
    _had_taken_nothing: bool = field(init=False, default=False)
    _left: set[str] = field(init=False, default_factory=set)

    def placed(self, launch: Launch, stopped: Callable[[], bool], left_s: float) -> Launch:
        """Return the launch with leased devices in its variables."""
        refuse_own_variable(launch.argv, self.placer.own)
        need = self._need(launch)
        if self._next is not None:
            self._release()
            self._taken = self._next
            self._next = None
        elif self._taken is None:
            with _naming_the_deadline(self.wait_s, left_s):
                if self.wait_s is None:
                    wait_s = None
                else:
                    wait_s = min(self.wait_s, left_s)
                self._taken = self.placer.take(need, stopped, wait_s=wait_s)
        else:
            if self.wait_s is None:
                wait_s = RELAUNCH_WAIT_S
            else:
                wait_s = self.wait_s
            with _naming_the_deadline(wait_s, left_s):
                again = partial(self.placer.again, wait_s=min(wait_s, left_s), stays=self.pinned)
                self._taken = again(self._taken, need, stopped)
        self._argv = launch.argv
        if self._taken is None:  # the user stopped the wait, so nothing starts
            return launch
        if self._taken.env:
            if (reason := why_not_reached(launch.argv)) is not None:
                get_logger().warning("the chosen devices do not reach the program", reason=reason)
            get_logger().info("placed", on=self._taken.shown, **self._taken.env)
        return replace(launch, env={**launch.env, **self._taken.env})

    @contextmanager
    def watching(self, recording: LiveOutput) -> Iterator[None]:
        """Release the leases when the log shows that the engine has taken its memory."""
        if self.until == "start":
            words = started_words(launcher_of(Launch(self._argv)).NAME)
        else:
            words = None
        need = self._needs.get(self._argv)
        if words is None or need is None or not need.tells_start:
            yield
            return
        live = OutputWatcher(recording, words.encode(), need.engines, self._release)
        try:
            yield
        finally:
            live.stop()

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with a move to another device as its first patch.

        That applies only if another process is the cause and another device has room.
        """
        incident = diagnosis.first_cause
        self._had_taken_nothing = incident is not None and incident.kind == _CAME_SINCE[0]
        if not self._may_move(incident) or incident is None or self._taken is None:
            return diagnosis
        try:
            self._left |= self._taken.keys
            self._next = self.placer.take(self._needs[self._argv], avoid=self._left)
        except (PlacementError, UsageError) as error:
            get_logger().debug("no other device", reason=str(error))
            return diagnosis
        if self._next is None:
            return diagnosis
        reason = (
            f"{self._next.shown} has room for it: "
            f"{', '.join(place.room for place in self._next.places)}"
        )
        moved = self._with_device(incident, self._next, reason)
        return replace(
            diagnosis,
            incidents=tuple(moved if one is incident else one for one in diagnosis.incidents),
        )

    def once_free(self, incident: Incident, stopped: Callable[[], bool], left_s: float) -> Incident:
        """Wait for memory if another process is the cause and no other device has room.

        Without ``--wait``, return the incident at once.
        """
        if (
            self._next is not None
            or self.wait_s is None
            or self._taken is None
            or not self._is_of_neighbour(incident)
        ):
            return incident
        began_s = time.monotonic()
        self._release()  # a start that waits goes first
        try:
            self._next = self.placer.take(
                self._needs[self._argv], stopped, wait_s=min(self.wait_s, left_s)
            )
        except (PlacementError, UsageError) as error:
            get_logger().warning("no device became free", reason=str(error))
            return incident
        if self._next is None:
            return incident
        waited_s = time.monotonic() - began_s
        return self._with_device(
            incident, self._next, f"after {waited_s:.0f} s {self._next.shown} has room for it"
        )

    def devices(self) -> frozenset[int] | None:
        """Return the GPUs of the next attempt; empty if only another process blocks them."""
        taken = self._next or self._taken
        if taken is None or not taken.env:
            return None
        if self._had_taken_nothing:
            return frozenset()
        return frozenset(place.index for place in taken.places)

    def _may_move(self, incident: Incident | None) -> bool:
        return self._is_of_neighbour(incident) and not self.pinned and not self.placer.asked.named

    def _is_of_neighbour(self, incident: Incident | None) -> bool:
        if self._taken is None or not self._taken.env or incident is None or not incident.causes:
            return False
        cause = incident.causes[0].id
        # The plan fitted into the free memory earlier, so another process has started since.
        planned = self._needs[self._argv].start is not None
        return cause == _NEIGHBOUR or (planned and (incident.kind, cause) == _CAME_SINCE)

    def _with_device(self, incident: Incident, taken: AssignedDevices, reason: str) -> Incident:
        old, new = (None if one is None else one.env.get(VISIBLE) for one in (self._taken, taken))
        patch = Patch(
            DEVICE, old, new, Effect.OUTPUT_PRESERVING, reason, as_env=as_env(DEVICE, new)
        )
        return replanned(
            incident, (patch, *(other for other in incident.plan if other.setting != DEVICE))
        )

    def _need(self, launch: Launch) -> DeviceNeed:
        if launch.argv not in self._needs:
            self._needs[launch.argv] = need_of(launch)
        return self._needs[launch.argv]

    def _release(self) -> None:
        if self._taken is not None:
            self._taken.release()


@contextmanager
def _naming_the_deadline(wait_s: float | None, left_s: float) -> Iterator[None]:
    """Mention the deadline in the error if the deadline cut the wait short."""
    try:
        yield
    except PlacementError as error:
        if wait_s is None or wait_s <= left_s or not error.is_for_now:
            raise
        hint = "set a later --deadline, or see who uses them: oomguard gpus"
        raise PlacementError(
            f"{error}; the deadline allows no longer wait", hint=hint, is_for_now=True
        ) from None
