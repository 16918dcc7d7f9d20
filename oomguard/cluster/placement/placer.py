"""Find the devices of a command, lease them, and wait for them with ``--wait``."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Final, Literal

from oomguard.analyst.attempt_settings import DEVICE
from oomguard.analyst.link import LiveOutput
from oomguard.cluster.placement.devices import (
    BY_BUS,
    ORDER,
    VISIBLE,
    DeviceSlot,
    apply_visible_devices,
    device_slots,
    match_devices,
)
from oomguard.cluster.placement.leases import Lease, LeaseFolder, LockFile
from oomguard.cluster.placement.need import (
    AssignedDevices,
    DeviceAvailability,
    DeviceNeed,
    DeviceRequest,
    Fitness,
    Invocation,
    check_device,
    fits_nowhere,
    lease_in_words,
    need_of,
    no_place_now,
    reasons_by_device,
    too_few_asked,
)
from oomguard.core.errors import PlacementError, UsageError
from oomguard.core.incident import Diagnosis, Effect, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.settings import as_env
from oomguard.diagnosis import replanned
from oomguard.engines.command import Launch
from oomguard.engines.devices import started_words
from oomguard.engines.registry import launcher_of
from oomguard.engines.unwrap_command import inner_commands
from oomguard.probe import nvml

# An empty device comes first: the smallest one on which the plan fits with its margin, so that
# larger ones stay free. Next comes the used device with the most free memory. It is a risk: its
# users may need more, and memory that they free during profiling spoils the engine's measurement.
# Several devices of one command are of the same model if possible.

Accepts = Callable[[Fitness], bool]


def rank_devices(
    need: DeviceNeed, places: Sequence[DeviceSlot], accepts: Accepts, *, emptied: bool = False
) -> list[DeviceSlot]:
    """Return the devices on which a command would start, the best first.

    Equally good devices keep the user's order.

    Args:
        need: what the command needs.
        places: the devices to judge.
        accepts: decides from the fitness whether a device is acceptable.
        emptied: judge each device as if it were empty.
    """
    kept = []
    for place in places:
        if place.cannot is not None:
            continue
        fitness = need.on(place, emptied=emptied)
        if accepts(fitness):
            kept.append((place, fitness))
    # Without a plan the command may need a lot, so prefer large devices.
    if need.start is None:
        largest_first = -1
    else:
        largest_first = 1

    def order(pair: tuple[DeviceSlot, Fitness]) -> tuple[bool, bool, int]:
        place, fitness = pair
        if place.is_empty:
            size = largest_first * (place.total_bytes or 0)
        else:
            size = -(place.free_bytes or 0)
        return not fitness.has_margin, not place.is_empty, size

    # sorted() is stable: equally good devices keep their order.
    return [place for place, _ in sorted(kept, key=order)]


def choose_devices(
    usable: Sequence[DeviceSlot], count: int, candidates: Sequence[DeviceSlot]
) -> tuple[DeviceSlot, ...] | None:
    """Return the best ``count`` usable devices in the order of the candidates, or None.

    The program numbers its devices in this order, so a user's own order must stay. None means that
    there are fewer than ``count``.
    """
    best = first_of_one_model(usable, count)
    if best is None:
        return None
    chosen = []
    for place in candidates:
        if place in best:
            chosen.append(place)
    return tuple(chosen)


def first_of_one_model(places: Sequence[DeviceSlot], count: int) -> tuple[DeviceSlot, ...] | None:
    """Return the first ``count`` devices, of one model if possible; None if there are fewer."""
    for one in places:
        alike = []
        for place in places:
            if (place.name, place.total_bytes) == (one.name, one.total_bytes):
                alike.append(place)
        if len(alike) >= count:
            return tuple(alike[:count])
    if len(places) >= count:
        return tuple(places[:count])
    return None


_NUMBER: Final = re.compile(r"\d{1,9}")


def devices_without_nvml(
    asked: DeviceRequest, environ: Mapping[str, str]
) -> tuple[DeviceSlot, ...] | None:
    """Return the devices that ``--gpus`` names by number while NVML does not answer.

    None means that the devices are ambiguous, so the command runs unchanged. That happens without a
    list, with a UUID in the list, or with UUIDs in CUDA_VISIBLE_DEVICES.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES hides a named device.
    """
    visible = list(map(str.strip, environ.get(VISIBLE, "").split(",")))
    if (
        not asked.named
        or not all(map(str.isdigit, asked.named))
        or any("-" in entry[1:] for entry in visible)
    ):
        return None
    numbers = set()
    for text in (*asked.named, *visible):
        if _NUMBER.fullmatch(text):
            numbers.add(int(text))
    limit = apply_visible_devices([DeviceSlot(number, None) for number in sorted(numbers)], environ)
    return asked.among(limit.places, hidden=limit.hides)


def variables_for(places: Sequence[DeviceSlot], need: DeviceNeed) -> dict[str, str]:
    """Return the variables that show a command these devices and no others.

    If the engine reads UUIDs, the variables use them: a device that drops off or returns then does
    not shift the others. Otherwise they use numbers in PCI bus order. A MIG instance has only its
    UUID.
    """
    instances = {place.instance for place in places} - {None}
    uuids = [place.uuid for place in places]
    if (need.visible.uuid or instances) and None not in uuids:
        return {VISIBLE: ",".join(map(str, uuids)), ORDER: BY_BUS}
    return {VISIBLE: ",".join(str(place.index) for place in places), ORDER: BY_BUS}


# Starts that wait for a device take turns in the order in which they came. Each has a ticket: a
# locked file, named after its time of arrival, whose lock ends with the process. The ticket lists
# the devices that its command could use now, and how many it needs. That many are reserved for it,
# and later starts may take the rest. So a device stays idle only if an earlier start waits for one
# more.

_BEGINS: Final = "turn-"
# A waiting start looks this often. After ``_SILENT_S`` without a look its process was stopped, and
# nothing stays reserved for it.
POLL_S: Final = 0.2
_SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class QueuedStart:
    """Hold one ticket: its name, the devices it needs, and the devices it could use now."""

    name: str
    count: int
    usable: tuple[str, ...]


class QueueTicket:
    """Hold a place in the queue; if the folder is not writable, do nothing."""

    def __init__(self, folder: LeaseFolder) -> None:
        # monotonic: a change of the system clock does not reorder tickets
        self.name = f"{_BEGINS}{time.monotonic_ns():020d}-{os.getpid()}"
        self._lock: LockFile | None = None
        if folder.why_off is None:
            # Without a ticket the start still works, but it may have to wait longer.
            with contextlib.suppress(OSError):
                self._lock = folder.lock(self.name)
                self._lock.take()

    def publish(self, count: int, usable: Sequence[str]) -> None:
        """Write which devices the command would take now."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.write({"count": count, "usable": list(usable), "at_s": time.monotonic()})

    def close(self) -> None:
        """Leave the queue."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.path.unlink()
            self._lock.close()
            self._lock = None


def earlier_starts(folder: LeaseFolder, own: QueueTicket | None) -> Iterator[QueuedStart]:
    """Yield the tickets that came before ``own``, or all tickets if it is None, in order."""
    if folder.why_off is not None:
        return
    if own is None:
        own_name = None
    else:
        own_name = f"{own.name}.lock"
    try:
        names = sorted(path.name for path in folder.path.glob(f"{_BEGINS}*.lock"))
    except OSError:
        # No folder, so no other start waits.
        return
    for name in names:
        if own_name is not None and name >= own_name:
            return
        if (start := _read_ticket(folder.path / name)) is not None:
            yield start


def _read_ticket(path: Path) -> QueuedStart | None:
    """Read a ticket, or return None if its process is gone or stopped.

    The ticket of a dead process is removed if permitted.
    """
    try:
        if path.exists():
            lock = LockFile(path)
        else:
            lock = None
        if lock is None:
            return None
        with contextlib.closing(lock):
            if not lock.is_taken():
                path.unlink()
                return None
            record = lock.read()
    except OSError:
        # The other start ended in the meantime.
        return None
    count = record.get("count")
    usable = record.get("usable")
    at_s = record.get("at_s")
    if not (isinstance(count, int) and isinstance(usable, list) and isinstance(at_s, (int, float))):
        return None
    if time.monotonic() - at_s > _SILENT_S:
        return None
    return QueuedStart(path.name, count, tuple(map(str, usable)))


def reserve_devices(waiting: Iterator[QueuedStart], free: Collection[str]) -> dict[str, str]:
    """Return the reserved free devices with the ticket that each is reserved for."""
    kept: dict[str, str] = {}
    for one in waiting:
        usable = []
        for key in one.usable:
            if key in free and key not in kept:
                usable.append(key)
        kept |= dict.fromkeys(usable[: one.count], one.name)
    return kept


_GETS_EMPTY: Final = "it gets a device that no process uses"


@dataclass(slots=True)
class Placer:
    """Place the attempts of one run.

    Attributes:
        asked: the value of ``--gpus``.
        folder: the folder of leases.
        environ: the user's environment variables.
        own: this call of ``oomguard run``, to show in messages.
        until: what ends a lease, ``start`` or ``job``.
        outer_pid: the process of a run around this one, whose leases count as ours; None without
            one.
    """

    asked: DeviceRequest
    folder: LeaseFolder
    environ: Mapping[str, str]
    own: Invocation
    until: str
    outer_pid: int | None = None
    _meant: dict[str, list[DeviceSlot]] = field(init=False, default_factory=dict)

    def take(
        self,
        need: DeviceNeed,
        stopped: Callable[[], bool] = lambda: False,
        *,
        avoid: Collection[str] = (),
        wait_s: float | None = None,
    ) -> AssignedDevices | None:
        """Find devices for a command and lease them.

        Args:
            need: what the command needs.
            stopped: returns whether the user stopped the wait.
            avoid: lease names of devices not to take.
            wait_s: the longest wait in seconds. None (default): do not wait.

        Returns:
            The devices, or None if the user stopped the wait.

        Raises:
            PlacementError: no device is suitable, or none became free in time.
            UsageError: a requested device does not exist, or the request contradicts the command.
        """

        def look(ticket: QueueTicket | None) -> AssignedDevices | tuple[DeviceAvailability, int]:
            survey = nvml.survey()
            is_first = ticket is None
            if survey.failure is not None and is_first:
                return self._blind(survey, need)
            now, count = self._look(survey, need, ticket, avoid, is_first=is_first)
            chosen = choose_devices(now.open, count, now.candidates)
            if chosen is None:
                taken = None
            else:
                taken = self._lease(chosen, need)
            if is_first and not avoid and (taken is not None or wait_s is not None):
                self._tell_unknown(need)
            if taken is None:
                return (now, count)
            return taken

        def none_there(now: DeviceAvailability, count: int, waited_s: float) -> PlacementError:
            if wait_s is None:
                waited = None
            else:
                waited = waited_s
            return no_place_now(need, now, count, waited, self.own.line(wait="30m"))

        def tell(now: DeviceAvailability, count: int) -> None:
            get_logger().info(
                "waiting for a device", devices=count, because=reasons_by_device(need, now)
            )

        return self._in_turn(look, none_there, tell, stopped, wait_s)

    def again(
        self,
        taken: AssignedDevices,
        need: DeviceNeed,
        stopped: Callable[[], bool],
        *,
        wait_s: float,
        stays: bool = False,
    ) -> AssignedDevices | None:
        """Find devices for the next attempt of a command that had devices before.

        The same devices come first, ahead of the queue, because the job has begun. Devices whose
        leases are still held stay with the command while they answer. Next come other devices with
        room, then the same devices regardless of their free memory. A device that dropped off the
        bus is not used again.

        Args:
            taken: the devices of the previous attempt.
            need: what the command needs.
            stopped: returns whether the user stopped the wait.
            wait_s: the longest wait in seconds.
            stays: whether the command must keep the same devices.

        Returns:
            The devices, or None if the user stopped the wait.

        Raises:
            PlacementError: other processes hold the devices for longer than ``wait_s``, or no
                device is left.
        """
        if taken.holds_all:
            if self._is_there(taken, need):
                return taken
            taken.release()

        def look(ticket: QueueTicket | None) -> AssignedDevices | tuple[DeviceAvailability, int]:
            now, count = self._look_again(taken, need, ticket)
            for places in _choices(taken, now, count, stays=stays):
                leased = self._lease(places, need)
                if leased is not None:
                    return leased
            return now, count

        def none_there(now: DeviceAvailability, _count: int, waited_s: float) -> PlacementError:
            because = reasons_by_device(need, now)
            return PlacementError(
                f"no device was free within {waited_s:.0f} s: {because}",
                hint="oomguard gpus",
                is_for_now=True,
            )

        def tell(now: DeviceAvailability, count: int) -> None:
            fields = {
                "devices": count,
                "at_most_s": round(wait_s),
                "because": reasons_by_device(need, now),
            }
            get_logger().warning("waiting for a device before the next attempt", **fields)

        return self._in_turn(look, none_there, tell, stopped, wait_s)

    def _in_turn(
        self,
        look: Callable[[QueueTicket | None], AssignedDevices | tuple[DeviceAvailability, int]],
        none_there: Callable[[DeviceAvailability, int, float], PlacementError],
        tell: Callable[[DeviceAvailability, int], None],
        stopped: Callable[[], bool],
        wait_s: float | None,
    ) -> AssignedDevices | None:
        """Look until devices are found, first come first served.

        Args:
            look: takes the ticket of the waiting start. Returns the devices, or what it saw and the
                number of devices needed.
            none_there: returns the error that ends the wait, from what was seen and the seconds
                waited.
            tell: logs once that the start waits.
            stopped: returns whether the user stopped the wait.
            wait_s: the longest wait in seconds. None: do not wait.

        Returns:
            The devices, or None if the user stopped the wait.
        """
        ticket: QueueTicket | None = None
        began_s = time.monotonic()
        try:
            while not stopped():
                with self.folder.gate():
                    found = look(ticket)
                    if isinstance(found, AssignedDevices):
                        return found
                    now, count = found
                    waited_s = time.monotonic() - began_s
                    if wait_s is None or waited_s >= wait_s:
                        raise none_there(now, count, waited_s)
                    is_first = ticket is None
                    ticket = ticket or QueueTicket(self.folder)
                    ticket.publish(count, [place.key for place in now.usable])
                if is_first:
                    tell(now, count)
                time.sleep(POLL_S)
            return None
        finally:
            if ticket is not None:
                ticket.close()

    def _look_again(
        self, taken: AssignedDevices, need: DeviceNeed, ticket: QueueTicket | None
    ) -> tuple[DeviceAvailability, int]:
        survey = nvml.survey()
        if survey.failure is None:
            return self._look(survey, need, ticket, (), is_first=False)
        return DeviceAvailability(taken.places, (), self._leased(taken.keys), ()), len(taken.places)

    def _look(
        self,
        survey: nvml.Survey,
        need: DeviceNeed,
        ticket: QueueTicket | None,
        avoid: Collection[str],
        *,
        is_first: bool,
    ) -> tuple[DeviceAvailability, int]:
        everywhere = device_slots(survey)
        limit = apply_visible_devices(everywhere, self.environ)
        count = self.asked.count or need.devices or 1
        if need.devices is not None and count < need.devices:
            raise too_few_asked(self.asked, need, count, self.own)
        permitted = []
        for place in limit.places:
            permitted.append(check_device(place, need, count, len(survey.gpus)))
        named = self.asked.among(permitted, hidden=limit.hides, meant=self._meant)
        self._meant = self._meant or {
            entry: match_devices(entry, permitted) for entry in self.asked.named
        }
        candidates = [place for place in named if place.key not in avoid]
        accepts = self._accepts
        if is_first and not avoid:
            self._tell_once(everywhere, limit.hides)
            possible = rank_devices(need, candidates, accepts, emptied=True)
            if first_of_one_model(possible, count) is None:
                raise fits_nowhere(need, candidates, count, limit.hides, self.asked, self.own)
        usable = rank_devices(need, candidates, accepts)
        keys = [place.key for place in everywhere]
        leased = self._leased(keys)
        free = []
        for key in keys:
            if key not in leased:
                free.append(key)
        kept = reserve_devices(earlier_starts(self.folder, ticket), free)
        return DeviceAvailability(
            tuple(candidates), tuple(usable), leased, tuple(kept), limit.hides
        ), count

    def _leased(self, keys: Iterable[str]) -> dict[str, str]:
        """Return which of these devices another process has leased, with the holder as text."""
        held = self.folder.holders(keys)
        reasons = {}
        for key, lease in held.items():
            if not self._is_ours(lease):
                reasons[key] = lease_in_words(lease)
        return reasons

    def _blind(self, survey: nvml.Survey, need: DeviceNeed) -> AssignedDevices:
        """Place a command while NVML does not answer: on the numbered devices, or unchanged."""
        log = get_logger()
        fields = {"reason": survey.failure, **({"driver": survey.driver} if survey.driver else {})}
        places = devices_without_nvml(self.asked, self.environ)
        if places is None:
            log.warning(
                "did not choose devices: NVML does not answer, so the command runs unchanged",
                **fields,
            )
            return AssignedDevices((), {})
        log.warning("did not check the devices of --gpus: NVML does not answer", **fields)
        leased = self.folder.take([place.key for place in places], self.own.command, self.until)
        return AssignedDevices(places, variables_for(places, need), leased or {})

    def _accepts(self, fitness: Fitness) -> bool:
        """Accept a device; one that the user names may be too small by the uncertainty."""
        return fitness.fits or (bool(self.asked.named) and not fitness.surely_not)

    def _lease(self, places: Sequence[DeviceSlot], need: DeviceNeed) -> AssignedDevices | None:
        held = self.folder.holders([place.key for place in places])
        ours = set()
        for key, lease in held.items():
            if self._is_ours(lease):
                ours.add(key)
        if need.tells_start:
            until = self.until
        else:
            until = "job"
        keys = []
        for place in places:
            if place.key not in ours:
                keys.append(place.key)
        locks = self.folder.take(keys, self.own.command, until)
        if locks is None:
            return None
        return AssignedDevices(tuple(places), variables_for(places, need), locks)

    def _is_ours(self, lease: Lease) -> bool:
        return self.outer_pid is not None and lease.pid == self.outer_pid

    def _is_there(self, taken: AssignedDevices, need: DeviceNeed) -> bool:
        """Return whether the command's devices still answer, and update their numbers."""
        survey = nvml.survey()
        if survey.failure is not None:
            return True
        everywhere = device_slots(survey)
        now = {}
        for place in everywhere:
            if place.cannot is None:
                now[place.key] = place
        for place in taken.places:
            if place.key not in now:
                why = "it has gone"
                for one in reversed(everywhere):
                    if one.index == place.index and one.cannot:
                        why = one.cannot
                get_logger().warning(f"no longer using {place.shown}", reason=why)
                return False
        places = tuple(now[place.key] for place in taken.places)
        has_moved = False
        for place, before in zip(places, taken.places, strict=True):
            has_moved = has_moved or place.index != before.index
        if has_moved:
            taken.places = places
            taken.env = variables_for(places, need)
        return True

    def _tell_unknown(self, need: DeviceNeed) -> None:
        if need.unknown is not None:
            if self.asked.named:
                gets = "it gets the devices of --gpus, even if other processes use them"
            else:
                gets = _GETS_EMPTY
            get_logger().info(f"the command's memory need is unknown: {gets}", reason=need.unknown)

    def _tell_once(self, everywhere: Sequence[DeviceSlot], hides: str | None) -> None:
        log = get_logger()
        if hides is not None:
            log.info(f"a limit: {hides}")
        for place in everywhere:
            if place.cannot is not None:
                log.warning(f"did not use {place.shown}", reason=place.cannot)
        if self.folder.why_off is not None:
            log.warning(
                "leases do not work: two starts at the same time may choose the same device",
                reason=self.folder.why_off,
            )


def _choices(
    taken: AssignedDevices, now: DeviceAvailability, count: int, *, stays: bool
) -> Iterator[tuple[DeviceSlot, ...]]:
    """Yield the device sets that a restarted command may get, the best first.

    Only a lease shows whether a set is really available.
    """
    there = {}
    for place in now.candidates:
        if place.cannot is None:
            there[place.key] = place
    slots = []
    for place in taken.places:
        if place.key in there:
            slots.append(there[place.key])
    had = tuple(slots)
    is_there = len(had) == len(taken.places)
    if is_there and taken.keys <= {place.key for place in now.usable}:
        yield had
    if not stays and (others := choose_devices(now.open, count, now.candidates)) is not None:
        yield others
    if is_there:
        yield had


# Run attempts on devices with enough room, and hold their leases.

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
    for inner in inner_commands(argv):
        if inner.has_no_others:
            return "a wrapper in the command removes inherited variables"
    return None


# Leases are held until the engine has its memory, so a late look costs others time.
OUTPUT_POLL_S: Final = 0.25


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
        while not self._stopped.wait(OUTPUT_POLL_S):
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
        # The user stopped the wait, so nothing starts.
        if self._taken is None:
            return launch
        if self._taken.env:
            if (reason := why_not_reached(launch.argv)) is not None:
                get_logger().warning("the command may not use the chosen devices", reason=reason)
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
        incidents = []
        for one in diagnosis.incidents:
            if one is incident:
                incidents.append(moved)
            else:
                incidents.append(one)
        return replace(diagnosis, incidents=tuple(incidents))

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
        # A start that waits goes first.
        self._release()
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
        old = None
        if self._taken is not None:
            old = self._taken.env.get(VISIBLE)
        new = taken.env.get(VISIBLE)
        patch = Patch(
            DEVICE, old, new, Effect.OUTPUT_PRESERVING, reason, as_env=as_env(DEVICE, new)
        )
        others = []
        for other in incident.plan:
            if other.setting != DEVICE:
                others.append(other)
        return replanned(incident, (patch, *others))

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
        # Name the deadline only if it was the reason for the short wait.
        if wait_s is None or wait_s <= left_s or not error.is_for_now:
            raise
        hint = "set a later --deadline, or see who uses them: oomguard gpus"
        raise PlacementError(
            f"{error}; the deadline allows no longer wait", hint=hint, is_for_now=True
        ) from None
