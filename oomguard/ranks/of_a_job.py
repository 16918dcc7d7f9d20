"""This process as one rank of a job, for ``oomguard run``: it watches the others while its command runs, and agrees with them after."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from oomguard.engines.command import Launch
from oomguard.exit_status import status_in_words
from oomguard.incident import Attempt
from oomguard.log import get_logger
from oomguard.ranks.claims import Claim
from oomguard.ranks.decision import absent_in_words
from oomguard.ranks.documents import Decision, How, RankEnd, Said
from oomguard.ranks.folder import Folder
from oomguard.ranks.launcher import starts_once
from oomguard.ranks.meeting import LEADER, Meeting
from oomguard.ranks.rendezvous import Rendezvous
from oomguard.ranks.watching import Watch
from oomguard.supervise.ended_by_us import EndedByUs
from oomguard.supervise.together import Agreed, OwnEnd

# What only an agreement needs is loaded for one: the command starts at once.
if TYPE_CHECKING:
    from oomguard.ranks.mirror import Mirror


class RankOfAJob:
    """Agrees with the other ranks (supervise/together.py), and goes along with the attempts (supervise/companions.py).

    Args:
        rendezvous: where the ranks meet.
        timeout_s: after the first failure, so long for all ranks to say how they ended.
        end: ends the command; it gets what is set when the attempt is over.
        claim: of this rank.
    """

    def __init__(
        self, rendezvous: Rendezvous, timeout_s: float, end: Callable[[threading.Event], None], claim: Claim
    ) -> None:
        self._rendezvous, self._timeout_s, self._end, self._claim = rendezvous, timeout_s, end, claim
        self._meeting: Meeting | None = None
        self._mirror: Mirror | None = None
        self._watch: Watch | None = None
        self._ended: EndedByUs | None = None
        self._why_off: str | None = None
        self._ends_badly: Callable[[], bool] | None = None

    @property
    def tells(self) -> bool:
        """Whether this rank tells of the job, and keeps its journal, while all is well."""
        return self._rendezvous.launched.rank == LEADER

    def began(self, number: int, launch: Launch, _pid: int | None) -> None:
        """Meet the others, now that the command has started, and watch them."""
        self._why_off = self._why_off or self._rendezvous.problem
        if self._why_off is None:
            self._ended = None
            self._watch = Watch(lambda: self._meeting or self._met(launch), number, self._end, self._why_apart)

    def ended(self, _attempt: Attempt) -> None:
        """Hear that an attempt has ended: it is known already."""

    def ended_by_us(self) -> EndedByUs | None:
        """Stop watching; return why the last attempt was ended for another rank, None where it was not."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._ended = watch.stop()
            self._meeting = watch.meeting
            if watch.problem is not None:
                self._off(watch.problem)
        return self._ended

    def agree(self, own: OwnEnd, stopped: Callable[[], bool]) -> Agreed:
        """Return what all ranks do after an attempt."""
        from oomguard.ranks.agreement import Round

        self.ended_by_us()
        decision, meeting, docs = None, self._meeting, dict[int, Said]()
        if meeting is not None and self._why_off is None:
            try:
                if stopped():
                    meeting.say(number=own.number, state="ended", end=stopped_end(own))
                    return Agreed(own.diagnosis)
                end, again = rank_end(own, self._ended), self._rendezvous.again
                decision = Round(meeting, end, self._timeout_s, stopped, again).decision()
                docs = meeting.look()
            except OSError as error:
                self._off(error.strerror or str(error))
        if decision is None or meeting is None or self._why_off is not None:
            why = () if self._why_off is None else (f"the ranks could not agree: {self._why_off}",)
            noted = replace(own.diagnosis, notes=(*own.diagnosis.notes, *why))
            return Agreed(noted, is_change_left=bool(own.patches))
        if decision.first is not None and not decision.again and LEADER not in decision.absent:
            self._ends_badly = stopped
        return self._agreed(decision, docs, own)

    def starts_again(self, number: int, agreed: Agreed | None, stopped: Callable[[], bool], *, is_able: bool) -> bool:
        """Wait until all ranks can make an attempt that they agreed on; return whether to make it."""
        if self._meeting is None or self._why_off is not None or agreed is None or not agreed.patches:
            return False
        from oomguard.ranks.agreement import start_together

        try:
            why = start_together(self._meeting, number, self._timeout_s, stopped, is_able=is_able)
        except OSError as error:
            self._off(error.strerror or str(error))
            return False
        if why is not None and is_able:
            get_logger().error("not run again: no rank starts without the others", why=why)
        return why is None

    def close(self) -> None:
        """Leave the others."""
        from oomguard.ranks.agreement import leave, let_leader_end

        self.ended_by_us()
        if self._meeting is not None and self._why_off is None:
            with contextlib.suppress(OSError):  # the last rank removes the folder
                leave(self._meeting, keeps_store=self._rendezvous.keeps_store)
                if self._ends_badly is not None:
                    let_leader_end(self._meeting, self._ends_badly)
        elif self._meeting is not None:
            self._meeting.withdraw()
        if self._mirror is not None:
            self._mirror.close()
        self._claim.release()
        if self._meeting is not None and self._why_off is None:
            self._meeting.tidy()
        elif self._meeting is not None or self._why_off is None:  # else the folder does not answer
            self._claim.remove_where_last()

    def _met(self, launch: Launch) -> Meeting:
        own, place = self._rendezvous.launched, self._rendezvous
        folder = Folder(place.folder)
        if place.mirrors:
            from oomguard.ranks.mirror import Mirror

            self._mirror = Mirror(place, folder, launch.argv)
        where = "" if place.store is None else f"{place.store.kind} store"
        get_logger().debug(
            "one of several ranks",
            rank=own.rank,
            size=own.size,
            launcher=own.launcher,
            meets_in=where or str(place.folder),
        )
        return Meeting(folder, own.rank, own.size, self._claim)

    def _why_apart(self) -> str | None:
        return None if self._mirror is None else self._mirror.why_apart()

    def _agreed(self, decision: Decision, docs: Mapping[int, Said], own: OwnEnd) -> Agreed:
        from oomguard.journal.codec import patch_of
        from oomguard.ranks.agreement import ends_of
        from oomguard.ranks.effects import tell_repeated
        from oomguard.ranks.permitted import is_change_left
        from oomguard.ranks.telling import record, told

        rank, size = self._rendezvous.launched.rank, self._rendezvous.launched.size
        is_told = rank == LEADER or LEADER not in docs or LEADER in decision.absent
        diagnosis = told(decision, ends_of(docs, own.number), own.diagnosis, rank, size)
        if is_told and own.number > 1 and starts_once(own.tail):
            hint = "put oomguard around the launcher: oomguard run -- mpirun …"
            get_logger().error("the program cannot start again under its launcher: MPI_Init is let in once", hint=hint)
        if decision.absent and is_told:
            problem = None if self._mirror is None else self._mirror.problem()
            beside = {} if problem is None else {"mirror": problem}
            if len(docs) < size:
                beside["hint"] = "each rank needs an oomguard run of its own; --rendezvous none has each rank alone"
            then = ": no rank starts again" if decision.silent or decision.first is not None else ""
            tell = (
                get_logger().error if decision.silent or rank != LEADER else get_logger().warning
            )  # others tell errors only
            tell(f"{absent_in_words(decision)}{then}", **beside)
        elif decision.why and decision.first is not None and is_told:
            get_logger().warning(f"no rank starts again: {decision.why}")
        elif decision.again and is_told:
            tell_repeated(ends_of(docs, own.number))
            if (why := self._why_apart()) is not None and len({doc.host for doc in docs.values()}) == 1:
                get_logger().warning("all ranks are on this host, and meet there without their store", reason=why)
        patches = tuple(patch_of(patch) for patch in decision.patches)
        again, left = patches if decision.again else (), patches if decision.is_exhausted else ()
        is_left = is_change_left(decision, ends_of(docs, own.number))
        return Agreed(diagnosis, again, decision.variables, record(decision, size), is_told, left, is_left)

    def _off(self, why: str) -> None:
        self._why_off = why
        get_logger().error("the ranks cannot meet: none starts again by itself", reason=why)


def stopped_end(own: OwnEnd) -> RankEnd:
    """Return how an attempt ended that a signal to this rank's oomguard ended: the others need not wait for it, nor blame it."""
    return RankEnd(own.number, "stopped", own.status, status_in_words(own.status))


def rank_end(own: OwnEnd, ended: EndedByUs | None) -> RankEnd:
    """Return how this rank's attempt ended, as it is told to the others."""
    from oomguard.ranks.effects import seen_row
    from oomguard.ranks.permitted import policy_row
    from oomguard.ranks.secondary import is_secondary
    from oomguard.report.json import kept_incident, patch_dict

    incident = own.diagnosis.first_cause
    is_oom = incident is not None and incident.is_oom
    how: How = "other"
    if is_oom:
        how = "memory"
    elif ended is not None:
        how = "ended"
    elif own.status == 0 and incident is None:
        how = "ran"
    elif is_secondary(own.tail):
        how = "secondary"
    row = None if incident is None or not is_oom else kept_incident(incident)
    patches = tuple(patch_dict(patch) for patch in own.patches)
    failed_s, did = own.failed_s if is_oom else None, own.did
    told = seen_row(did.seen), did.idempotent, did.own_files, policy_row(did.policy, did.chosen)
    return RankEnd(own.number, how, own.status, own.error, row, patches, own.refusal, failed_s, *told)
