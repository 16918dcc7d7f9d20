"""A run whose attempts are placed: each gets devices with room for it, and holds their leases until
it has started or ended.
"""

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

from oomguard.analyst.effective_settings import DEVICE
from oomguard.analyst.link import LiveOutput
from oomguard.cluster.placement.devices import VISIBLE
from oomguard.cluster.placement.need import DeviceNeed, Taken, need_of
from oomguard.cluster.placement.placer import Placer
from oomguard.cluster.placement.refusal import Invocation
from oomguard.core.errors import PlacementError, UsageError
from oomguard.core.incident import Diagnosis, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.setting_spellings import as_env
from oomguard.diagnosis.diagnose import replanned
from oomguard.engines.command import Launch
from oomguard.engines.devices import started_words
from oomguard.engines.registry import launcher_of
from oomguard.engines.unwrap_command import inner_commands

# Whether variables that are set around a command reach the program that it runs in the end.

# What starts the program elsewhere, with variables of its own.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("docker", "podman", "nerdctl"),
        "name the devices to it (docker run --gpus '\"device=UUID\"'), or run oomguard inside",
    ),
    "ssh": "its devices are another machine's: run oomguard there "
    "(ssh HOST oomguard run --gpus auto -- …)",
    "kubectl": "its devices are those of the pod: run oomguard inside",
}


def refuse_own_variable(argv: Sequence[str], own: Invocation) -> None:
    """Raise UsageError where the command sets CUDA_VISIBLE_DEVICES by itself, over whatever is set
    around it.
    """
    for inner in inner_commands(argv):
        value = inner.variables.get(VISIBLE)
        if value is not None:
            raise UsageError(
                f"the command sets {VISIBLE}={value} itself, over any device that it is given",
                hint=(
                    "leave it out there; as a limit it stands in front: "
                    f"{VISIBLE}={shlex.quote(value)} {own.line(command='…')}"
                ),
            )


def why_not_reached(argv: Sequence[str]) -> str | None:
    """Return why the variables do not reach the program, None where they do as far as
    can be told.
    """
    name = PurePath(argv[0]).name
    if name in _ELSEWHERE:
        return f"{name} hands no variable on: {_ELSEWHERE[name]}"
    if any(inner.has_no_others for inner in inner_commands(argv)):
        return "a wrapper in the command takes the inherited variables away"
    return None


# Look for words in what a command prints while it runs, beside the copying: a thread reads the
# copy, and waits in between.

POLL_S: Final = 0.25


class LiveWords:
    """Calls ``then`` once the words have stood in the output so many times.

    Args:
        recording: what is printed.
        words: what is looked for.
        times: how often it has to stand there.
        then: called once, in the thread.
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
        """End the thread."""
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
            # What is left of the end is shorter than the words, so nothing is counted twice.
            self._seam = text[max(0, len(text) - len(self._words) + 1) :]
            if self._left <= 0:
                self._then()
                return


_NEIGHBOUR: Final = "colocated_process"
# What an engine says before it has taken anything.
_CAME_SINCE: Final = ("startup_free_memory_below_utilization", "utilization_too_high")
# An attempt after the first is a part of a job that has begun: where others have every device it
# waits, though nobody asked, but not long.
RELAUNCH_WAIT_S: Final = 60.0


@dataclass(slots=True)
class OnDevices:
    """Places the attempts of one run; ``Placing`` says what it is asked.

    Attributes:
        placer: finds places and takes their leases.
        until: what ends a lease: the engine's start, where its log tells it, or the end of the job.
        wait_s: how long to wait for a device at most; None: not at all.
        pinned: whether the user forbids another device.
    """

    placer: Placer
    until: Literal["start", "job"]
    wait_s: float | None
    pinned: bool = False
    _taken: Taken | None = field(init=False, default=None)
    _next: Taken | None = field(init=False, default=None)
    _needs: dict[tuple[str, ...], DeviceNeed] = field(init=False, default_factory=dict)
    _argv: tuple[str, ...] = field(init=False, default=())
    _had_taken_nothing: bool = field(init=False, default=False)
    _left: set[str] = field(init=False, default_factory=set)

    def placed(self, launch: Launch, stopped: Callable[[], bool], left_s: float) -> Launch:
        """Return the launch with its devices in its variables, their leases taken."""
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
        if self._taken is None:  # the user stopped the wait: nothing is started
            return launch
        if self._taken.env:
            if (reason := why_not_reached(launch.argv)) is not None:
                get_logger().warning("the devices do not reach the program", reason=reason)
            get_logger().info("placed", on=self._taken.shown, **self._taken.env)
        return replace(launch, env={**launch.env, **self._taken.env})

    @contextmanager
    def watching(self, recording: LiveOutput) -> Iterator[None]:
        """Give the leases back once the engine has told that it has taken its memory."""
        if self.until == "start":
            words = started_words(launcher_of(Launch(self._argv)).NAME)
        else:
            words = None
        need = self._needs.get(self._argv)
        if words is None or need is None or not need.tells_start:
            yield
            return
        live = LiveWords(recording, words.encode(), need.engines, self._release)
        try:
            yield
        finally:
            live.stop()

    def moved(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with a move as the first remedy where a neighbour is the cause and
        another place has room.
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
        """Wait for room where a neighbour is the cause, nothing else has room, and ``--wait`` was
        asked for.
        """
        if (
            self._next is not None
            or self.wait_s is None
            or self._taken is None
            or not self._is_of_neighbour(incident)
        ):
            return incident
        began_s = time.monotonic()
        self._release()  # whoever takes its turn now is before us
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
        """Return the GPUs of the attempt that is next; none where all that they lack is a
        neighbour's.
        """
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
        # It was placed where its plan fitted into what was free: somebody has come since.
        planned = self._needs[self._argv].start is not None
        return cause == _NEIGHBOUR or (planned and (incident.kind, cause) == _CAME_SINCE)

    def _with_device(self, incident: Incident, taken: Taken, reason: str) -> Incident:
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
    """Say of a wait that was in vain that it was the deadline which ended it, where it was."""
    try:
        yield
    except PlacementError as error:
        if wait_s is None or wait_s <= left_s or not error.is_for_now:
            raise
        hint = "a later --deadline, or look who has them: oomguard gpus"
        raise PlacementError(
            f"{error}; the deadline permits no longer wait", hint=hint, is_for_now=True
        ) from None
