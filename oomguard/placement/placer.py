"""Find the devices of a command, take their leases, and wait for them where that is asked for."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oomguard.errors import PlacementError
from oomguard.log import get_logger
from oomguard.observe import nvml
from oomguard.placement import refusing
from oomguard.placement.asked import Asked
from oomguard.placement.choosing import chosen_of, first_of_one_kind, fitting
from oomguard.placement.found import Now, Taken
from oomguard.placement.leases import Lease, LeaseFolder
from oomguard.placement.need import Fitness, Need
from oomguard.placement.places import Place, limited, places_of
from oomguard.placement.turns import POLL_S, Ticket, kept_for, waiting_before
from oomguard.placement.variables import variables_for


@dataclass(slots=True)
class Placer:
    """Places the attempts of one run.

    Attributes:
        asked: what ``--gpus`` asks for.
        folder: where leases are held.
        environ: the user's variables.
        command: the user's own, masked, as others are told of it.
        until: what ends a lease, ``start`` or ``job``.
        outer_pid: the run around this one, whose leases are ours.
    """

    asked: Asked
    folder: LeaseFolder
    environ: Mapping[str, str]
    command: str
    until: str
    outer_pid: int | None = None

    def take(
        self,
        need: Need,
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
            survey, is_first = nvml.survey(), ticket is None
            if survey.failure is not None and is_first:
                return self._blind(survey, need)
            now, count = self._look(survey, need, ticket, avoid, is_first=is_first)
            chosen = chosen_of(now.open, count, now.candidates)
            taken = None if chosen is None else self._lease(chosen, need)
            return (now, count) if taken is None else taken

        def none_there(now: Now, count: int, waited_s: float) -> PlacementError:
            again = f"oomguard run --gpus {self.asked.shown} --wait 30m -- {self.command}"
            return refusing.no_place_now(need, now, count, None if wait_s is None else waited_s, again)

        def tell(now: Now, count: int) -> None:
            get_logger().info("waiting for a device", devices=count, because=refusing.rows(need, now))

        return self._in_turn(look, none_there, tell, stopped, wait_s)

    def again(
        self, taken: Taken, need: Need, stopped: Callable[[], bool], *, wait_s: float, stays: bool = False
    ) -> Taken | None:
        """Take devices for a command that had some and gave their leases back; None where the user stopped the wait.

        The same ones come first, before who waits: their job has begun. Then others with room, then the same whatever is free of them.

        Args:
            taken: what it had.
            need: what the command needs.
            stopped: asked while it waits.
            wait_s: how long to wait at most.
            stays: whether it is to have no others.

        Raises:
            PlacementError: others have them for longer than that.
        """

        def look(ticket: Ticket | None) -> Taken | tuple[Now, int]:
            now, count = self._look_again(taken, need, ticket)
            had = (self._lease(places, need) for places in _choices(taken, now, count, stays=stays))
            return next((found for found in had if found is not None), (now, count))

        def none_there(now: Now, _count: int, waited_s: float) -> PlacementError:
            because = refusing.rows(need, now)
            return PlacementError(
                f"no device, also after {waited_s:.0f} s: {because}", hint="oomguard gpus", is_for_now=True
            )

        def tell(now: Now, count: int) -> None:
            told = {"devices": count, "at_most_s": round(wait_s), "because": refusing.rows(need, now)}
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
            look: returns what it took, else what there is now and how many are needed; it gets the ticket of who waits.
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
                    is_first, ticket = ticket is None, ticket or Ticket(self.folder)
                    ticket.tell(count, [place.key for place in now.usable])
                if is_first:
                    tell(now, count)
                time.sleep(POLL_S)
            return None
        finally:
            if ticket is not None:
                ticket.close()

    def _look_again(self, taken: Taken, need: Need, ticket: Ticket | None) -> tuple[Now, int]:
        survey = nvml.survey()
        if survey.failure is None:
            return self._look(survey, need, ticket, (), is_first=False)
        return Now(taken.places, (), self._leased(taken.keys), ()), len(taken.places)

    def _look(
        self, survey: nvml.Survey, need: Need, ticket: Ticket | None, avoid: Collection[str], *, is_first: bool
    ) -> tuple[Now, int]:
        everywhere = places_of(survey)
        limit = limited(everywhere, self.environ)
        count = self.asked.count or need.devices or 1
        if need.devices is not None and count < need.devices:
            raise refusing.too_few_asked(self.asked, need, count)
        permitted = [refusing.judged(place, need, count, len(survey.gpus)) for place in limit.places]
        candidates = [place for place in self.asked.among(permitted, hidden=limit.hides) if place.key not in avoid]
        accepts = self._accepts
        if is_first and not avoid:
            self._tell_once(need, everywhere, limit.hides)
            possible = fitting(need, candidates, accepts, emptied=True)
            if first_of_one_kind(possible, count) is None:
                raise refusing.fits_nowhere(need, candidates, count, limit.hides, self.asked)
        usable = fitting(need, candidates, accepts)
        keys = [place.key for place in everywhere]
        leased = self._leased(keys)
        free = [key for key in keys if key not in leased]
        kept = kept_for(waiting_before(self.folder, ticket), free)
        return Now(tuple(candidates), tuple(usable), leased, tuple(kept)), count

    def _leased(self, keys: Iterable[str]) -> dict[str, str]:
        """Return which of these somebody else has, with who that is in words."""
        held = self.folder.holders(keys)
        return {key: refusing.lease_in_words(lease) for key, lease in held.items() if not self._is_ours(lease)}

    def _blind(self, survey: nvml.Survey, need: Need) -> Taken:
        """Place a command where NVML does not answer: on the devices that are named by number, else as it is."""
        log, told = get_logger(), {"reason": survey.failure, "driver": survey.driver}
        if not self.asked.named or not all(name.isdigit() for name in self.asked.named):
            log.warning("not placed: which devices there are is not known; the command runs as it is", **told)
            return Taken((), {})
        places = tuple(Place(int(name), None) for name in self.asked.named)
        log.warning("the devices that --gpus names are taken as they are: NVML does not answer", **told)
        return Taken(
            places,
            variables_for(places, need),
            self.folder.take([p.key for p in places], self.command, self.until) or {},
        )

    def _accepts(self, fitness: Fitness) -> bool:
        """Judge a place: one that the user names may be beyond the plan by what that is uncertain by."""
        return fitness.fits or (bool(self.asked.named) and not fitness.surely_not)

    def _lease(self, places: Sequence[Place], need: Need) -> Taken | None:
        held = self.folder.holders([place.key for place in places])
        ours = {key for key, lease in held.items() if self._is_ours(lease)}
        until = self.until if need.tells_start else "job"
        locks = self.folder.take([p.key for p in places if p.key not in ours], self.command, until)
        if locks is None:
            return None
        return Taken(tuple(places), variables_for(places, need), locks)

    def _is_ours(self, lease: Lease) -> bool:
        return self.outer_pid is not None and lease.pid == self.outer_pid

    def _tell_once(self, need: Need, everywhere: Sequence[Place], hides: str | None) -> None:
        log = get_logger()
        if hides is not None:
            log.info("a limit", what=hides)
        for place in everywhere:
            if place.cannot is not None:
                log.warning(f"{place.shown} is left out", reason=place.cannot)
        if need.unknown is not None:
            log.info("what it needs is not known: it gets a device that nobody uses", reason=need.unknown)
        if self.folder.why_off is not None:
            log.warning("no leases: two starts at one moment may choose one device", reason=self.folder.why_off)


def _choices(taken: Taken, now: Now, count: int, *, stays: bool) -> Iterator[tuple[Place, ...]]:
    """Yield what a command that had devices may have now, the best first; a lease says whether it can be had."""
    if taken.keys <= {place.key for place in now.usable}:
        yield taken.places
    if not stays and (others := chosen_of(now.open, count, now.candidates)) is not None:
        yield others
    yield taken.places


def command_in_words(argv: Sequence[str]) -> str:
    """Return a masked command as others are told of it."""
    return shlex.join(argv)
