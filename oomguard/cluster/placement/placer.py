"""Find the devices of a command, take their leases, and wait for them where that is asked for."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from oomguard.cluster.placement import refusal
from oomguard.cluster.placement.devices import (
    BY_BUS,
    ORDER,
    VISIBLE,
    DeviceSlot,
    limited,
    named_by,
    places_of,
)
from oomguard.cluster.placement.leases import Lease, LeaseFolder, Lock
from oomguard.cluster.placement.need import DeviceNeed, DeviceRequest, Fitness, Now, Taken
from oomguard.cluster.placement.refusal import Invocation
from oomguard.core.errors import PlacementError
from oomguard.core.log import get_logger
from oomguard.probe import nvml

# Which of the places a command gets.
#
# A place that nobody uses comes first, the smallest of them on which the plan fits with its margin:
# a larger one stays for who needs it. Only then one that others use, the one with most room: what
# they hold may grow, and what they free while an engine profiles spoils what it measures. Several
# devices for one command are of one kind where they can be.

Accepts = Callable[[Fitness], bool]


def fitting(
    need: DeviceNeed, places: Sequence[DeviceSlot], accepts: Accepts, *, emptied: bool = False
) -> list[DeviceSlot]:
    """Return the places on which a command would start, the best first; of equally good ones in
    their own order, the user's.
    """
    judged = [(place, need.on(place, emptied=emptied)) for place in places if place.cannot is None]
    kept = [(place, fitness) for place, fitness in judged if accepts(fitness)]
    # Of one that nothing is known about, all that is known is that it may be large.
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

    return [
        place for place, _ in sorted(kept, key=order)
    ]  # sorted() leaves what serves equally well as it came


def chosen_of(
    usable: Sequence[DeviceSlot], count: int, candidates: Sequence[DeviceSlot]
) -> tuple[DeviceSlot, ...] | None:
    """Return the ``count`` best of the places that can be taken, in the order of the candidates:
    that is the user's own where one was given, and it numbers the devices that the program sees.
    None where there are fewer.
    """
    best = first_of_one_kind(usable, count)
    if best is None:
        return None
    return tuple(place for place in candidates if place in best)


def first_of_one_kind(places: Sequence[DeviceSlot], count: int) -> tuple[DeviceSlot, ...] | None:
    """Return the first ``count`` places of one kind, else the first of any kind; None where there
    are fewer.
    """
    for one in places:
        alike = [
            place
            for place in places
            if (place.name, place.total_bytes) == (one.name, one.total_bytes)
        ]
        if len(alike) >= count:
            return tuple(alike[:count])
    if len(places) >= count:
        return tuple(places[:count])
    return None


# Devices that ``--gpus`` names where NVML does not answer: their numbers are all that is known of
# them.

_NUMBER: Final = re.compile(r"\d{1,9}")


def named_unseen(asked: DeviceRequest, environ: Mapping[str, str]) -> tuple[DeviceSlot, ...] | None:
    """Return the devices that are named by number; None where nothing tells which are meant, and
    the command runs as it is.

    That is so without a list, with a UUID in it, and where CUDA_VISIBLE_DEVICES names devices by
    UUID: they may be these or others.

    Raises:
        UsageError: CUDA_VISIBLE_DEVICES hides one that is named.
    """
    visible = [entry.strip() for entry in environ.get(VISIBLE, "").split(",")]
    if (
        not asked.named
        or not all(map(str.isdigit, asked.named))
        or any("-" in entry[1:] for entry in visible)
    ):
        return None
    numbers = {int(text) for text in (*asked.named, *visible) if _NUMBER.fullmatch(text)}
    limit = limited([DeviceSlot(number, None) for number in sorted(numbers)], environ)
    return asked.among(limit.places, hidden=limit.hides)


# The variables under which a command sees the devices that it was given, and no others.


def variables_for(places: Sequence[DeviceSlot], need: DeviceNeed) -> dict[str, str]:
    """Return the variables for some places.

    By UUID where the command's engine is known to read one, so that a device that falls off or
    comes back moves no other one into its place; else by index, counted along the bus as NVML does.
    An instance of a divided GPU has no other name than its UUID.
    """
    by_uuid = need.visible.uuid or any(place.instance is not None for place in places)
    uuids = [place.uuid for place in places]
    if by_uuid and all(uuid is not None for uuid in uuids):
        return {VISIBLE: ",".join(str(uuid) for uuid in uuids), ORDER: BY_BUS}
    return {VISIBLE: ",".join(str(place.index) for place in places), ORDER: BY_BUS}


def in_front(variables: Mapping[str, str]) -> str:
    """Return the variables as they stand before a command in a shell."""
    return " ".join(f"{name}={value}" for name, value in variables.items())


# Whose turn it is: starts that wait for a device, in the order in which they came.
#
# Each has a ticket, a locked file whose name says when it came: it is gone with its process. A
# ticket tells which devices its command could use now, and how many it needs. So many of them are
# kept for it; what is left over may be taken by those behind it, so that a device is idle only
# where somebody before waits for one more.

_BEGINS: Final = "turn-"
# Who waits looks this often; one that has not looked for so long was stopped, and nothing is kept
# for it.
POLL_S: Final = 0.2
_SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one ticket tells: when it came, how many devices it needs, and which it
    could use now.
    """

    name: str
    count: int
    usable: tuple[str, ...]


class Ticket:
    """A place in the queue; None of it is left where the folder takes no files."""

    def __init__(self, folder: LeaseFolder) -> None:
        # of this boot, whatever is done to the clock
        self.name = f"{_BEGINS}{time.monotonic_ns():020d}-{os.getpid()}"
        self._lock: Lock | None = None
        if folder.why_off is None:
            with contextlib.suppress(OSError):
                self._lock = folder.lock(self.name)
                self._lock.take()

    def tell(self, count: int, usable: Sequence[str]) -> None:
        """Tell what would be taken now."""
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


def waiting_before(folder: LeaseFolder, own: Ticket | None) -> Iterator[Waiting]:
    """Yield those who came before a ticket, or all without one, in their order."""
    if folder.why_off is not None:
        return
    if own is None:
        own_name = None
    else:
        own_name = f"{own.name}.lock"
    try:
        names = sorted(path.name for path in folder.path.glob(f"{_BEGINS}*.lock"))
    except OSError:
        return
    for name in names:
        if own_name is not None and name >= own_name:
            return
        if (told := _told(folder.path / name)) is not None:
            yield told


def _told(path: Path) -> Waiting | None:
    """Read a ticket; None for one whose process is gone or stopped. What a dead one left is removed
    where that is permitted.
    """
    try:
        if path.exists():
            lock = Lock(path)
        else:
            lock = None
        if lock is None:
            return None
        with contextlib.closing(lock):
            if not lock.is_taken():
                path.unlink()
                return None
            told = lock.read()
    except OSError:
        return None
    count = told.get("count")
    usable = told.get("usable")
    at_s = told.get("at_s")
    if not (isinstance(count, int) and isinstance(usable, list) and isinstance(at_s, (int, float))):
        return None
    if time.monotonic() - at_s > _SILENT_S:
        return None
    return Waiting(path.name, count, tuple(str(key) for key in usable))


def kept_for(waiting: Iterator[Waiting], free: Collection[str]) -> dict[str, str]:
    """Return which free devices are kept for whom: for each, as many as it needs of those it could
    use.
    """
    kept: dict[str, str] = {}
    for one in waiting:
        usable = [key for key in one.usable if key in free and key not in kept]
        kept |= dict.fromkeys(usable[: one.count], one.name)
    return kept


_GETS_EMPTY: Final = "it gets what nobody uses"


@dataclass(slots=True)
class Placer:
    """Places the attempts of one run.

    Attributes:
        asked: what ``--gpus`` asks for.
        folder: where leases are held.
        environ: the user's variables.
        own: the call itself, to be told and pasted, and its command, as others are told of it.
        until: what ends a lease, ``start`` or ``job``.
        outer_pid: the run around this one, whose leases are ours.
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
    ) -> Taken | None:
        """Find places for a command and take their leases; None where the user stopped the wait.

        Args:
            need: what the command needs.
            stopped: asked while it waits.
            avoid: places not to take.
            wait_s: how long to wait at most; None: not at all.

        Raises:
            PlacementError: no place does, or none in time.
            UsageError: what is asked for is not there, or contradicts the command.
        """

        def look(ticket: Ticket | None) -> Taken | tuple[Now, int]:
            survey = nvml.survey()
            is_first = ticket is None
            if survey.failure is not None and is_first:
                return self._blind(survey, need)
            now, count = self._look(survey, need, ticket, avoid, is_first=is_first)
            chosen = chosen_of(now.open, count, now.candidates)
            if chosen is None:
                taken = None
            else:
                taken = self._lease(chosen, need)
            if is_first and not avoid and (taken is not None or wait_s is not None):
                self._tell_unknown(need)
            if taken is None:
                return (now, count)
            return taken

        def none_there(now: Now, count: int, waited_s: float) -> PlacementError:
            if wait_s is None:
                waited = None
            else:
                waited = waited_s
            return refusal.no_place_now(need, now, count, waited, self.own.line(wait="30m"))

        def tell(now: Now, count: int) -> None:
            get_logger().info(
                "waiting for a device", devices=count, because=refusal.rows(need, now)
            )

        return self._in_turn(look, none_there, tell, stopped, wait_s)

    def again(
        self,
        taken: Taken,
        need: DeviceNeed,
        stopped: Callable[[], bool],
        *,
        wait_s: float,
        stays: bool = False,
    ) -> Taken | None:
        """Take devices for a command that had some; None where the user stopped the wait.

        The same ones come first, before who waits: their job has begun. Those that it has still
        stay its own while they answer. Else come others with room, then the same whatever is free
        of them. One that fell off is never given again.

        Args:
            taken: what it had.
            need: what the command needs.
            stopped: asked while it waits.
            wait_s: how long to wait at most.
            stays: whether it is to have no others.

        Raises:
            PlacementError: others have them for longer than that, or none is there any more.
        """
        if taken.holds_all:
            if self._is_there(taken, need):
                return taken
            taken.release()

        def look(ticket: Ticket | None) -> Taken | tuple[Now, int]:
            now, count = self._look_again(taken, need, ticket)
            had = (self._lease(places, need) for places in _choices(taken, now, count, stays=stays))
            return next((found for found in had if found is not None), (now, count))

        def none_there(now: Now, _count: int, waited_s: float) -> PlacementError:
            because = refusal.rows(need, now)
            return PlacementError(
                f"no device, also after {waited_s:.0f} s: {because}",
                hint="oomguard gpus",
                is_for_now=True,
            )

        def tell(now: Now, count: int) -> None:
            told = {
                "devices": count,
                "at_most_s": round(wait_s),
                "because": refusal.rows(need, now),
            }
            get_logger().warning("waiting for a device to start again", **told)

        return self._in_turn(look, none_there, tell, stopped, wait_s)

    def _in_turn(
        self,
        look: Callable[[Ticket | None], Taken | tuple[Now, int]],
        none_there: Callable[[Now, int, float], PlacementError],
        tell: Callable[[Now, int], None],
        stopped: Callable[[], bool],
        wait_s: float | None,
    ) -> Taken | None:
        """Look until places are had, first come first served; None where the user stopped the wait.

        Args:
            look: returns what it took, else what there is now and how many are needed; it gets the
                ticket of who waits.
            none_there: returns the error that ends the wait, by that and the seconds it took.
            tell: says, once, that it waits.
            stopped: asked before each look.
            wait_s: how long to wait at most; None: not at all.
        """
        ticket: Ticket | None = None
        began_s = time.monotonic()
        try:
            while not stopped():
                with self.folder.gate():
                    found = look(ticket)
                    if isinstance(found, Taken):
                        return found
                    now, count = found
                    waited_s = time.monotonic() - began_s
                    if wait_s is None or waited_s >= wait_s:
                        raise none_there(now, count, waited_s)
                    is_first = ticket is None
                    ticket = ticket or Ticket(self.folder)
                    ticket.tell(count, [place.key for place in now.usable])
                if is_first:
                    tell(now, count)
                time.sleep(POLL_S)
            return None
        finally:
            if ticket is not None:
                ticket.close()

    def _look_again(self, taken: Taken, need: DeviceNeed, ticket: Ticket | None) -> tuple[Now, int]:
        survey = nvml.survey()
        if survey.failure is None:
            return self._look(survey, need, ticket, (), is_first=False)
        return Now(taken.places, (), self._leased(taken.keys), ()), len(taken.places)

    def _look(
        self,
        survey: nvml.Survey,
        need: DeviceNeed,
        ticket: Ticket | None,
        avoid: Collection[str],
        *,
        is_first: bool,
    ) -> tuple[Now, int]:
        everywhere = places_of(survey)
        limit = limited(everywhere, self.environ)
        count = self.asked.count or need.devices or 1
        if need.devices is not None and count < need.devices:
            raise refusal.too_few_asked(self.asked, need, count, self.own)
        permitted = [refusal.judged(place, need, count, len(survey.gpus)) for place in limit.places]
        named = self.asked.among(permitted, hidden=limit.hides, meant=self._meant)
        self._meant = self._meant or {
            entry: named_by(entry, permitted) for entry in self.asked.named
        }
        candidates = [place for place in named if place.key not in avoid]
        accepts = self._accepts
        if is_first and not avoid:
            self._tell_once(everywhere, limit.hides)
            possible = fitting(need, candidates, accepts, emptied=True)
            if first_of_one_kind(possible, count) is None:
                raise refusal.fits_nowhere(
                    need, candidates, count, limit.hides, self.asked, self.own
                )
        usable = fitting(need, candidates, accepts)
        keys = [place.key for place in everywhere]
        leased = self._leased(keys)
        free = [key for key in keys if key not in leased]
        kept = kept_for(waiting_before(self.folder, ticket), free)
        return Now(tuple(candidates), tuple(usable), leased, tuple(kept), limit.hides), count

    def _leased(self, keys: Iterable[str]) -> dict[str, str]:
        """Return which of these somebody else has, with who that is in words."""
        held = self.folder.holders(keys)
        return {
            key: refusal.lease_in_words(lease)
            for key, lease in held.items()
            if not self._is_ours(lease)
        }

    def _blind(self, survey: nvml.Survey, need: DeviceNeed) -> Taken:
        """Place a command where NVML does not answer: on the devices that are named by number, else
        as it is.
        """
        log = get_logger()
        told = {"reason": survey.failure, **({"driver": survey.driver} if survey.driver else {})}
        places = named_unseen(self.asked, self.environ)
        if places is None:
            log.warning(
                "not placed: which devices there are is not known; the command runs as it is",
                **told,
            )
            return Taken((), {})
        log.warning(
            "the devices that --gpus names are taken as they are: NVML does not answer", **told
        )
        leased = self.folder.take([place.key for place in places], self.own.command, self.until)
        return Taken(places, variables_for(places, need), leased or {})

    def _accepts(self, fitness: Fitness) -> bool:
        """Judge a place: one that the user names may be beyond the plan by what that is uncertain
        by.
        """
        return fitness.fits or (bool(self.asked.named) and not fitness.surely_not)

    def _lease(self, places: Sequence[DeviceSlot], need: DeviceNeed) -> Taken | None:
        held = self.folder.holders([place.key for place in places])
        ours = {key for key, lease in held.items() if self._is_ours(lease)}
        if need.tells_start:
            until = self.until
        else:
            until = "job"
        locks = self.folder.take(
            [p.key for p in places if p.key not in ours], self.own.command, until
        )
        if locks is None:
            return None
        return Taken(tuple(places), variables_for(places, need), locks)

    def _is_ours(self, lease: Lease) -> bool:
        return self.outer_pid is not None and lease.pid == self.outer_pid

    def _is_there(self, taken: Taken, need: DeviceNeed) -> bool:
        """Return whether devices that a command has still answer; what their numbers are now goes
        into its variables.
        """
        survey = nvml.survey()
        if survey.failure is not None:
            return True
        everywhere = places_of(survey)
        now = {place.key: place for place in everywhere if place.cannot is None}
        for place in taken.places:
            if place.key not in now:
                why = next(
                    (one.cannot for one in everywhere if one.index == place.index and one.cannot),
                    "it is gone",
                )
                get_logger().warning(f"{place.shown} is left", reason=why)
                return False
        places = tuple(now[place.key] for place in taken.places)
        if places and [place.index for place in places] != [place.index for place in taken.places]:
            taken.places, taken.env = places, variables_for(places, need)
        return True

    def _tell_unknown(self, need: DeviceNeed) -> None:
        if need.unknown is not None:
            if self.asked.named:
                gets = "those that --gpus names are taken, whoever uses them"
            else:
                gets = _GETS_EMPTY
            get_logger().info(f"what it needs is not known: {gets}", reason=need.unknown)

    def _tell_once(self, everywhere: Sequence[DeviceSlot], hides: str | None) -> None:
        log = get_logger()
        if hides is not None:
            log.info(f"a limit: {hides}")
        for place in everywhere:
            if place.cannot is not None:
                log.warning(f"{place.shown} is left out", reason=place.cannot)
        if self.folder.why_off is not None:
            log.warning(
                "no leases: two starts at one moment may choose one device",
                reason=self.folder.why_off,
            )


def _choices(
    taken: Taken, now: Now, count: int, *, stays: bool
) -> Iterator[tuple[DeviceSlot, ...]]:
    """Yield what a command that had devices may have now, the best first; a lease says whether it
    can be had.
    """
    there = {place.key: place for place in now.candidates if place.cannot is None}
    had = tuple(there[place.key] for place in taken.places if place.key in there)
    is_there = len(had) == len(taken.places)
    if is_there and taken.keys <= {place.key for place in now.usable}:
        yield had
    if not stays and (others := chosen_of(now.open, count, now.candidates)) is not None:
        yield others
    if is_there:
        yield had
