"""This process as one rank of a job, for ``oomguard run``: it watches the others while its command
runs, and agrees with them after.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.analyst.coordination import AttemptReport, Verdict
from oomguard.analyst.outcome import TerminationReason
from oomguard.cluster.ranks.barrier import LEADER, Meeting
from oomguard.cluster.ranks.clock import Offset
from oomguard.cluster.ranks.decision import absent_in_words, decide, ranks_in_words
from oomguard.cluster.ranks.launcher import starts_once
from oomguard.cluster.ranks.messages import Decision, Folder, How, RankEnd, Said
from oomguard.cluster.ranks.rank_lock import Claim
from oomguard.cluster.ranks.rendezvous import Rendezvous
from oomguard.cluster.ranks.watch_ranks import RankMonitor, calling
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.process_state import status_in_words
from oomguard.diagnosis.diagnose import replanned
from oomguard.engines.command import Launch
from oomguard.journal.codec import incident_of, patch_of

if TYPE_CHECKING:
    from oomguard.cluster.ranks.mirror import Mirror


# After an attempt: all ranks say how it ended, rank 0 decides for all, and all start again or none.
#
# No rank waits longer than the deadline after the first failure. A rank that has not said by then
# how its attempt ended is silent, and with a silent rank none starts again: it would wait in its
# first collective for one that does not come. Where rank 0 itself is silent, each rank ends by
# itself; only rank 0 ever decides to start again, so two can never decide differently.

# After the first failure, so long for all ranks to say how they ended.
DEFAULT_TIMEOUT_S: Final = 30.0
# Rank 0 decides so much earlier, that the others have its decision in time.
_LEADER_RATIO: Final = 5 / 6
# A failure of something else than memory, which another rank's memory failure may have led to.
_OTHER_S: Final = 5.0
# Ranks that start together have met by then.
_MET_S: Final = 10.0
_PAUSE_S: Final = 0.1
# A thousand ranks that read one another are a load for the folder.
_RANKS_A_PAUSE: Final = 512
# Rank 0's documents may go with it: so long it waits until the others have read the last one.
_LEAVE_S: Final = 3.0
# It reports, and may put the job back into its queue.
_LEADER_TELLS_S: Final = 10.0


class Round:
    """The ranks agree on one attempt.

    Args:
        meeting: the ranks.
        own: how this rank's attempt ended.
        timeout_s: the deadline.
        stopped: whether the user asked to stop.
        variables: returns what every rank's command gets in its environment where they start again;
            of rank 0.
    """

    def __init__(
        self,
        meeting: Meeting,
        own: RankEnd,
        timeout_s: float,
        stopped: Callable[[], bool],
        variables: Callable[[], Mapping[str, str]],
    ) -> None:
        self._meeting = meeting
        self._own = own
        self._timeout_s = timeout_s
        self._stopped = stopped
        self._variables = variables
        self._began_s = time.monotonic()
        self._called_s: float | None = None

    def decision(self) -> Decision | None:
        """Return what all do; None after a stop. Raises OSError where this rank cannot say how its
        attempt ended.
        """
        self._meeting.say(number=self._own.number, state="ended", end=self._own)
        while not self._stopped():
            docs = self._meeting.look()
            leader = docs.get(LEADER)
            if (
                leader is not None
                and leader.decision is not None
                and leader.decision.number == self._own.number
            ):
                return leader.decision
            if self._called_s is None and calling(docs, self._own.number) is not None:
                self._called_s = time.monotonic()
            if self._meeting.is_leader:
                decision = self._of_leader(docs)
            else:
                decision = self._without_leader(docs)
            if decision is not None:
                if self._meeting.is_leader:
                    self._meeting.say(decision=decision)
                return decision
            time.sleep(max(_PAUSE_S, self._meeting.size / _RANKS_A_PAUSE))
        return None

    def _of_leader(self, docs: dict[int, Said]) -> Decision | None:
        ends = ends_of(docs, self._own.number)
        waited_for = set(range(self._meeting.size)) - set(ends)
        left = {
            rank for rank, doc in docs.items() if doc.state == "left"
        }  # without saying how it ended
        gone = (self._meeting.lost() | left) & waited_for
        silent = gone or self._overdue(waited_for, _LEADER_RATIO)
        if waited_for and silent is None:
            return None
        offsets = {rank: _offset(docs[rank]) for rank in ends}
        variables = {} if waited_for else self._variables()
        return decide(
            self._own.number,
            ends,
            offsets,
            silent=silent or (),
            gone=self._meeting.lost(),
            variables=variables,
        )

    def _without_leader(self, docs: dict[int, Said]) -> Decision | None:
        """Return that none starts again, where rank 0 does not decide."""
        leader = docs.get(LEADER)
        has_left = leader is not None and leader.state == "left"
        if has_left:
            gone = {LEADER}
        else:
            gone = {LEADER} & self._meeting.lost()
        ends = ends_of(docs, self._own.number)
        silent: set[int] | None = gone or self._overdue({LEADER}, 1.0)
        if silent is None:
            return None
        if silent and not gone:  # whom rank 0 has not met, this one has not heard either
            silent = set(range(self._meeting.size)) - set(ends)
        offsets = {rank: _offset(docs[rank]) for rank in ends}
        return decide(self._own.number, ends, offsets, silent=silent, gone=self._meeting.lost())

    def _overdue(self, waited_for: set[int], ratio: float) -> set[int] | None:
        """Return which of these ranks are not waited for any longer; None where they are; empty
        where nobody has to be blamed.
        """
        now_s = time.monotonic()
        if self._called_s is not None:
            is_over = now_s - self._called_s > ratio * self._timeout_s
            if is_over or self._met_nobody(self._timeout_s):
                return waited_for
            return None
        if (
            self._own.how == "ran"
        ):  # the others go on with their work, unless their hosts are gone, or nobody is there
            is_over = self._met_nobody(_MET_S) or waited_for <= self._meeting.silent()
            if waited_for and is_over:
                return waited_for
            return None
        if self._own.how in {"other", "memory"}:
            limit_s = _OTHER_S
        else:
            limit_s = self._timeout_s
        if now_s - self._began_s > ratio * limit_s:
            return set()
        return None

    def _met_nobody(self, within_s: float) -> bool:
        """Return whether no other rank was met, so long after this one began."""
        return (
            len(self._meeting.missing()) == self._meeting.size - 1
            and self._meeting.age_s() > within_s
        )


def start_together(
    meeting: Meeting, number: int, timeout_s: float, stopped: Callable[[], bool], *, is_able: bool
) -> str | None:
    """Wait until all ranks can make an attempt; return why none makes it, None where all do. Raises
    OSError.

    Args:
        meeting: the ranks.
        number: the attempt.
        timeout_s: how long this rank waits for the others.
        stopped: whether the user asked to stop.
        is_able: whether this rank can make it.
    """
    if is_able:
        meeting.say(number=number, state="ready")
    if is_able:
        why = _why_not_together(meeting, number, timeout_s, stopped)
    else:
        why = "this rank cannot"
    if why is not None:
        meeting.say(state="left", number=number - 1)
    return why


def _why_not_together(
    meeting: Meeting, number: int, timeout_s: float, stopped: Callable[[], bool]
) -> str | None:
    began_s = time.monotonic()
    while not stopped():
        docs = meeting.look()
        unable = {rank for rank, doc in docs.items() if doc.state == "left"} | meeting.lost()
        waited_for = {
            rank for rank in range(meeting.size) if rank not in docs or docs[rank].number < number
        }
        if unable:
            return f"{ranks_in_words(unable)} cannot"
        if not waited_for:
            return None
        if time.monotonic() - began_s > timeout_s:
            return f"{ranks_in_words(waited_for)} did not get ready within {timeout_s:g} s"
        time.sleep(_PAUSE_S)
    return "stopped"


def leave(meeting: Meeting, *, keeps_store: bool) -> None:
    """Say that this rank leaves; where the others read what it says from a store of its own, wait a
    moment until they have.
    """
    meeting.leave()
    began_s = time.monotonic()
    while keeps_store and time.monotonic() - began_s < _LEAVE_S:
        if all(doc.state == "left" for doc in meeting.look().values()):
            return
        time.sleep(_PAUSE_S)


def let_leader_end(meeting: Meeting, stopped: Callable[[], bool]) -> None:
    """Wait a while until rank 0 has left: a launcher may end all ranks with the first one that
    fails, and rank 0 has to tell why.
    """
    began_s = time.monotonic()
    while not meeting.is_leader and not stopped() and time.monotonic() - began_s < _LEADER_TELLS_S:
        leader = meeting.look().get(LEADER)
        if leader is None or leader.state == "left" or LEADER in meeting.lost():
            return
        time.sleep(_PAUSE_S)


def ends_of(docs: Mapping[int, Said], number: int) -> dict[int, RankEnd]:
    """Return how the ranks ended an attempt that have said so."""
    return {
        rank: doc.end
        for rank, doc in docs.items()
        if doc.end is not None and doc.end.number == number
    }


def _offset(doc: Said) -> Offset | None:
    if doc.rank == LEADER:
        return Offset(0.0, 0.0)
    if doc.offset_s is None:
        return None
    return Offset(doc.offset_s, doc.slack_s)


# What is told of a decision: the failure of the rank that failed first, what became of the others,
# and who was silent.

_HOWS: Final = {
    "memory": "ran out of memory",
    "secondary": "lost the others",
    "ended": "ended by oomguard for it",
    "stopped": "ended by a signal",
    "other": "failed of something else",
    "ran": "ran",
}


def told(
    decision: Decision, ends: Mapping[int, RankEnd], own: Diagnosis, rank: int, size: int
) -> Diagnosis:
    """Return what this rank tells after a decision: one incident, of the rank that failed first,
    and how each rank ended.

    Args:
        decision: of rank 0.
        ends: how each rank ended.
        own: what this rank's output tells.
        rank: this one.
        size: how many ranks there are.
    """
    if all(how == "ran" for how in decision.hows.values()) and not decision.absent:
        return own
    notes = (*(own.notes if decision.first in {None, rank} else ()), *_notes(decision, size))
    if decision.first is None:
        return replace(own, notes=notes)
    if decision.first == rank:
        found = own.first_cause
    else:
        found = None
    if decision.first in ends:
        row = ends[decision.first].incident
    else:
        row = None
    incident = found or (None if row is None else incident_of(row))
    if incident is None:
        return replace(own, notes=notes)
    others = [
        f"rank {other}"
        for other, how in decision.hows.items()
        if how == "memory" and other != str(decision.first)
    ]
    planned = replanned(incident, plan_of_all(incident.plan, decision))
    return replace(own, incidents=(_of_rank(planned, decision.first, others),), notes=notes)


def plan_of_all(own: Sequence[Patch], decision: Decision) -> tuple[Patch, ...]:
    """Return the plan of the rank that failed first, with what all ranks change in front: no less
    is enough for all.
    """
    of_all = [patch_of(patch) for patch in decision.patches]
    if len(of_all) > 1:  # none of them is enough alone
        group = 1 + max((patch.group for patch in own if patch.group is not None), default=0)
        of_all = [replace(patch, group=group) for patch in of_all]
    named = {patch.setting for patch in of_all}
    return (*of_all, *(patch for patch in own if patch.setting not in named))


def record(decision: Decision, size: int) -> dict[str, Any]:
    """Return a decision as the report has it, and as the journal keeps it with the incident."""
    return {
        "size": size,
        "first": decision.first,
        "first_is_known": decision.is_order_known,
        "ended": dict(decision.hows),
        "silent": list(decision.silent),
        "again": decision.again,
        "why_not": decision.why or None,
        "plan": [dict(patch) for patch in decision.patches],
    }


def _of_rank(incident: Incident, rank: int, others: list[str]) -> Incident:
    named = incident.location.process
    if named is None:
        process = f"rank {rank}"
    else:
        process = f"rank {rank}: {named}"
    return replace(
        incident,
        location=replace(incident.location, process=process),
        also_in=(*incident.also_in, *others),
    )


def _notes(decision: Decision, size: int) -> tuple[str, ...]:
    by_how: dict[str, list[int]] = {}
    for rank, how in decision.hows.items():
        by_how.setdefault(how, []).append(int(rank))
    hows = "; ".join(
        f"{ranks_in_words(ranks)}: {_HOWS.get(how, how)}" for how, ranks in by_how.items()
    )
    notes = [f"{size} ranks. {hows}"]
    if decision.first is not None:
        if decision.is_order_known:
            known = ""
        else:
            known = (
                " (their clocks do not tell the order: it had the least room, or the lowest number)"
            )
        notes.append(f"first: rank {decision.first}{known}")
    if decision.absent:
        notes.append(absent_in_words(decision))
    return tuple(notes)


# What only an agreement needs is loaded for one: the command starts at once.


class RankOfAJob:
    """Agrees with the other ranks (supervise/together.py), and goes along with the attempts
    (supervise/companions.py).

    Args:
        rendezvous: where the ranks meet.
        timeout_s: after the first failure, so long for all ranks to say how they ended.
        end: ends the command; it gets what is set when the attempt is over.
        claim: of this rank.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        end: Callable[[threading.Event], None],
        claim: Claim,
    ) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._end = end
        self._claim = claim
        self._meeting: Meeting | None = None
        self._mirror: Mirror | None = None
        self._watch: RankMonitor | None = None
        self._ended: TerminationReason | None = None
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
            self._watch = RankMonitor(
                lambda: self._meeting or self._met(launch), number, self._end, self._why_apart
            )

    def ended(self, _attempt: Attempt) -> None:
        """Hear that an attempt has ended: it is known already."""

    def ended_by_us(self) -> TerminationReason | None:
        """Stop watching; return why the last attempt was ended for another rank, None where it was
        not.
        """
        watch = self._watch
        self._watch = None
        if watch is not None:
            self._ended = watch.stop()
            self._meeting = watch.meeting
            if watch.problem is not None:
                self._off(watch.problem)
        return self._ended

    def agree(self, own: AttemptReport, stopped: Callable[[], bool]) -> Verdict:
        """Return what all ranks do after an attempt."""

        self.ended_by_us()
        decision = None
        meeting = self._meeting
        docs = dict[int, Said]()
        if meeting is not None and self._why_off is None:
            try:
                if stopped():
                    meeting.say(number=own.number, state="ended", end=stopped_end(own))
                    return Verdict(own.diagnosis)
                end = rank_end(own, self._ended)
                again = self._rendezvous.again
                decision = Round(meeting, end, self._timeout_s, stopped, again).decision()
                docs = meeting.look()
            except OSError as error:
                self._off(error.strerror or str(error))
        if decision is None or meeting is None or self._why_off is not None:
            why = () if self._why_off is None else (f"the ranks could not agree: {self._why_off}",)
            noted = replace(own.diagnosis, notes=(*own.diagnosis.notes, *why))
            return Verdict(noted, is_change_left=bool(own.patches))
        if decision.first is not None and not decision.again and LEADER not in decision.absent:
            self._ends_badly = stopped
        return self._agreed(decision, docs, own)

    def starts_again(
        self, number: int, agreed: Verdict | None, stopped: Callable[[], bool], *, is_able: bool
    ) -> bool:
        """Wait until all ranks can make an attempt that they agreed on; return whether
        to make it.
        """
        if (
            self._meeting is None
            or self._why_off is not None
            or agreed is None
            or not agreed.patches
        ):
            return False

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
        own = self._rendezvous.launched
        place = self._rendezvous
        folder = Folder(place.folder)
        if place.mirrors:
            from oomguard.cluster.ranks.mirror import Mirror

            self._mirror = Mirror(place, folder, launch.argv)
        if place.store is None:
            where = ""
        else:
            where = f"{place.store.kind} store"
        get_logger().debug(
            "one of several ranks",
            rank=own.rank,
            size=own.size,
            launcher=own.launcher,
            meets_in=where or str(place.folder),
        )
        return Meeting(folder, own.rank, own.size, self._claim)

    def _why_apart(self) -> str | None:
        if self._mirror is None:
            return None
        return self._mirror.why_apart()

    def _agreed(self, decision: Decision, docs: Mapping[int, Said], own: AttemptReport) -> Verdict:
        from oomguard.cluster.ranks.decision import is_change_left, tell_repeated
        from oomguard.journal.codec import patch_of

        rank = self._rendezvous.launched.rank
        size = self._rendezvous.launched.size
        is_told = rank == LEADER or LEADER not in docs or LEADER in decision.absent
        diagnosis = told(decision, ends_of(docs, own.number), own.diagnosis, rank, size)
        if is_told and own.number > 1 and starts_once(own.tail):
            hint = "put oomguard around the launcher: oomguard run -- mpirun …"
            get_logger().error(
                "the program cannot start again under its launcher: MPI_Init is let in once",
                hint=hint,
            )
        if decision.absent and is_told:
            if self._mirror is None:
                problem = None
            else:
                problem = self._mirror.problem()
            if problem is None:
                beside = {}
            else:
                beside = {"mirror": problem}
            if len(docs) < size:
                beside["hint"] = (
                    "each rank needs an oomguard run of its own; --rendezvous none has each rank "
                    "alone"
                )
            if decision.silent or decision.first is not None:
                then = ": no rank starts again"
            else:
                then = ""
            tell = (
                get_logger().error if decision.silent or rank != LEADER else get_logger().warning
            )  # others tell errors only
            tell(f"{absent_in_words(decision)}{then}", **beside)
        elif decision.why and decision.first is not None and is_told:
            get_logger().warning(f"no rank starts again: {decision.why}")
        elif decision.again and is_told:
            tell_repeated(ends_of(docs, own.number))
            if (why := self._why_apart()) is not None and len(
                {doc.host for doc in docs.values()}
            ) == 1:
                get_logger().warning(
                    "all ranks are on this host, and meet there without their store", reason=why
                )
        patches = tuple(patch_of(patch) for patch in decision.patches)
        again = patches if decision.again else ()
        left = patches if decision.is_exhausted else ()
        is_left = is_change_left(decision, ends_of(docs, own.number))
        return Verdict(
            diagnosis, again, decision.variables, record(decision, size), is_told, left, is_left
        )

    def _off(self, why: str) -> None:
        self._why_off = why
        get_logger().error("the ranks cannot meet: none starts again by itself", reason=why)


def stopped_end(own: AttemptReport) -> RankEnd:
    """Return how an attempt ended that a signal to this rank's oomguard ended: the others need not
    wait for it, nor blame it.
    """
    return RankEnd(own.number, "stopped", own.status, status_in_words(own.status))


def rank_end(own: AttemptReport, ended: TerminationReason | None) -> RankEnd:
    """Return how this rank's attempt ended, as it is told to the others."""
    from oomguard.cluster.ranks.decision import is_secondary, policy_row, seen_row
    from oomguard.report.json import patch_dict, stored_incident

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
    if incident is None or not is_oom:
        row = None
    else:
        row = stored_incident(incident)
    patches = tuple(patch_dict(patch) for patch in own.patches)
    failed_s = own.failed_s if is_oom else None
    did = own.did
    told = seen_row(did.seen), did.idempotent, did.own_files, policy_row(did.policy, did.chosen)
    return RankEnd(
        own.number, how, own.status, own.error, row, patches, own.refusal, failed_s, *told
    )
