"""Coordinate one rank of a job for ``oomguard run``.

The rank watches the others while its command runs, and agrees with them on the next attempt.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomguard.analyst.attempt_hooks import AttemptReport, Verdict
from oomguard.analyst.outcome import TerminationReason
from oomguard.cluster.ranks.barrier import (
    LEADER,
    ClockOffset,
    ContestedError,
    RankBarrier,
    RankLock,
)
from oomguard.cluster.ranks.decision import absent_in_words, decide, ranks_in_words
from oomguard.cluster.ranks.messages import Decision, How, MessageFolder, RankEnd, RankMessage
from oomguard.cluster.ranks.rendezvous import Rendezvous, starts_once
from oomguard.core.incident import Attempt, Diagnosis, Incident, Patch
from oomguard.core.log import get_logger
from oomguard.core.process import status_in_words
from oomguard.diagnosis import replanned
from oomguard.engines.command import Launch
from oomguard.journal.codec import incident_of, patch_of
from oomguard.report.json import stored_incident

if TYPE_CHECKING:
    from oomguard.cluster.ranks.rendezvous import StoreMirror


# After an attempt each rank reports its result. Rank 0 decides, and either all ranks restart or
# none does. No rank waits longer than the deadline after the first failure. If a rank has not
# reported by then, no rank restarts, because its first collective would wait for the silent rank.
# If rank 0 is silent, each rank ends. Only rank 0 ever decides to restart, so two decisions cannot
# differ.

# Rank 0 decides this much before the deadline, so that the others get its decision in time.
_LEADER_RATIO: Final = 5 / 6
# A failure that is not an out-of-memory, but may follow another rank's out-of-memory.
_OTHER_S: Final = 5.0
# Ranks that start together have met after this time.
_MET_S: Final = 10.0
# Thousands of ranks look at one folder, so this grows with their number.
_PAUSE_S: Final = 0.1
# A thousand ranks that read each other's messages put load on the folder.
_RANKS_A_PAUSE: Final = 512
# Rank 0's messages may vanish with it, so it waits this long for the others to read the last one.
_LEAVE_S: Final = 3.0
# Rank 0 reports the run, and may requeue the job.
_LEADER_TELLS_S: Final = 10.0


class AgreementRound:
    """Agree with the other ranks on the end of one attempt.

    Args:
        meeting: the messages of the ranks.
        own: the result of this rank's attempt.
        timeout_s: the deadline in seconds.
        stopped: returns whether the user stopped the run.
        variables: returns the environment variables of every rank's next attempt; only rank 0 uses
            it.
    """

    def __init__(
        self,
        meeting: RankBarrier,
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
        """Return the decision for all ranks, or None after a stop.

        Raises:
            OSError: this rank cannot report its result.
        """
        self._meeting.update(number=self._own.number, state="ended", end=self._own)
        while not self._stopped():
            docs = self._meeting.look()
            leader = docs.get(LEADER)
            if (
                leader is not None
                and leader.decision is not None
                and leader.decision.number == self._own.number
            ):
                return leader.decision
            if self._called_s is None and find_failed_peer(docs, self._own.number) is not None:
                self._called_s = time.monotonic()
            if self._meeting.is_leader:
                decision = self._of_leader(docs)
            else:
                decision = self._without_leader(docs)
            if decision is not None:
                if self._meeting.is_leader:
                    self._meeting.update(decision=decision)
                return decision
            time.sleep(max(_PAUSE_S, self._meeting.size / _RANKS_A_PAUSE))
        return None

    def _of_leader(self, docs: dict[int, RankMessage]) -> Decision | None:
        ends = reported_ends(docs, self._own.number)
        waited_for = set(range(self._meeting.size)) - set(ends)
        # These ranks left without reporting their result.
        left = set()
        for rank, doc in docs.items():
            if doc.state == "left":
                left.add(rank)
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

    def _without_leader(self, docs: dict[int, RankMessage]) -> Decision | None:
        """Return the decision that no rank restarts, because rank 0 does not decide."""
        leader = docs.get(LEADER)
        has_left = leader is not None and leader.state == "left"
        if has_left:
            gone = {LEADER}
        else:
            gone = {LEADER} & self._meeting.lost()
        ends = reported_ends(docs, self._own.number)
        silent: set[int] | None = gone or self._overdue({LEADER}, 1.0)
        if silent is None:
            return None
        # This rank knows only the ranks that rank 0 has met.
        if silent and not gone:
            silent = set(range(self._meeting.size)) - set(ends)
        offsets = {rank: _offset(docs[rank]) for rank in ends}
        return decide(self._own.number, ends, offsets, silent=silent, gone=self._meeting.lost())

    def _overdue(self, waited_for: set[int], ratio: float) -> set[int] | None:
        """Return which of these ranks are overdue.

        None means that this rank still waits. An empty set means that the wait is over, but no rank
        is to blame.
        """
        now_s = time.monotonic()
        if self._called_s is not None:
            is_over = now_s - self._called_s > ratio * self._timeout_s
            if is_over or self._met_nobody(self._timeout_s):
                return waited_for
            return None
        if self._own.how == "ran":
            # The others still work, unless their hosts are gone or no rank ever came.
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
        """Return whether this rank met no other rank within a reasonable time."""
        return (
            len(self._meeting.missing()) == self._meeting.size - 1
            and self._meeting.age_s() > within_s
        )


def start_together(
    meeting: RankBarrier,
    number: int,
    timeout_s: float,
    stopped: Callable[[], bool],
    *,
    is_able: bool,
) -> str | None:
    """Wait until all ranks are ready for an attempt.

    Args:
        meeting: the messages of the ranks.
        number: the number of the attempt.
        timeout_s: the longest wait in seconds.
        stopped: returns whether the user stopped the run.
        is_able: whether this rank is ready.

    Returns:
        The reason why no rank starts, or None if all start.

    Raises:
        OSError: a message cannot be read or written.
    """
    if is_able:
        meeting.update(number=number, state="ready")
    if is_able:
        why = _why_not_together(meeting, number, timeout_s, stopped)
    else:
        why = "this rank is not ready"
    if why is not None:
        meeting.update(state="left", number=number - 1)
    return why


def _why_not_together(
    meeting: RankBarrier, number: int, timeout_s: float, stopped: Callable[[], bool]
) -> str | None:
    began_s = time.monotonic()
    while not stopped():
        docs = meeting.look()
        left = set()
        for rank, doc in docs.items():
            if doc.state == "left":
                left.add(rank)
        unable = left | meeting.lost()
        waited_for = set()
        for rank in range(meeting.size):
            if rank not in docs or docs[rank].number < number:
                waited_for.add(rank)
        if unable:
            return f"{ranks_in_words(unable)} cannot"
        if not waited_for:
            return None
        if time.monotonic() - began_s > timeout_s:
            return f"{ranks_in_words(waited_for)} was not ready within {timeout_s:g} s"
        time.sleep(_PAUSE_S)
    return "stopped"


def leave(meeting: RankBarrier, *, keeps_store: bool) -> None:
    """Announce that this rank leaves.

    If the others read its messages from a store that this rank keeps, wait until they have read
    them.
    """
    meeting.leave()
    began_s = time.monotonic()
    while keeps_store and time.monotonic() - began_s < _LEAVE_S:
        if all(doc.state == "left" for doc in meeting.look().values()):
            return
        time.sleep(_PAUSE_S)


def let_leader_end(meeting: RankBarrier, stopped: Callable[[], bool]) -> None:
    """Wait a while until rank 0 has left.

    A launcher may end all ranks when the first one fails, and rank 0 must report the reason first.
    """
    began_s = time.monotonic()
    while not meeting.is_leader and not stopped() and time.monotonic() - began_s < _LEADER_TELLS_S:
        leader = meeting.look().get(LEADER)
        if leader is None or leader.state == "left" or LEADER in meeting.lost():
            return
        time.sleep(_PAUSE_S)


def reported_ends(docs: Mapping[int, RankMessage], number: int) -> dict[int, RankEnd]:
    """Return the results that the ranks have reported for an attempt."""
    results = {}
    for rank, doc in docs.items():
        if doc.end is not None and doc.end.number == number:
            results[rank] = doc.end
    return results


def _offset(doc: RankMessage) -> ClockOffset | None:
    if doc.rank == LEADER:
        return ClockOffset(0.0, 0.0)
    if doc.offset_s is None:
        return None
    return ClockOffset(doc.offset_s, doc.slack_s)


_HOWS: Final = {
    "memory": "ran out of memory",
    "secondary": "lost the connection to the others",
    "ended": "ended by oomguard for another rank",
    "stopped": "ended by a signal",
    "other": "failed for another reason",
    "ran": "ran",
}


def merged_diagnosis(
    decision: Decision, ends: Mapping[int, RankEnd], own: Diagnosis, rank: int, size: int
) -> Diagnosis:
    """Return the diagnosis that this rank reports after a decision.

    It has one incident, that of the rank that failed first, and the result of each rank.

    Args:
        decision: the decision of rank 0.
        ends: the results of the ranks.
        own: the diagnosis of this rank's output.
        rank: the number of this rank.
        size: the number of ranks.
    """
    if set(decision.hows.values()) <= {"ran"} and not decision.absent:
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
    others = []
    for other, how in decision.hows.items():
        if how == "memory" and other != str(decision.first):
            others.append(f"rank {other}")
    planned = replanned(incident, plan_of_all(incident.plan, decision))
    return replace(own, incidents=(_of_rank(planned, decision.first, others),), notes=notes)


def plan_of_all(own: Sequence[Patch], decision: Decision) -> tuple[Patch, ...]:
    """Return the plan of the rank that failed first, starting with the patches that all ranks
    need.
    """
    of_all = list(map(patch_of, decision.patches))
    # One of these patches alone is not enough.
    if len(of_all) > 1:
        group = 1 + max((patch.group for patch in own if patch.group is not None), default=0)
        of_all = [replace(patch, group=group) for patch in of_all]
    named = {patch.setting for patch in of_all}
    others = []
    for patch in own:
        if patch.setting not in named:
            others.append(patch)
    return (*of_all, *others)


def decision_record(decision: Decision, size: int) -> dict[str, Any]:
    """Return a decision as the report and the journal store it."""
    return {
        "size": size,
        "first": decision.first,
        "first_is_known": decision.is_order_known,
        "ended": dict(decision.hows),
        "silent": list(decision.silent),
        "again": decision.again,
        "why_not": decision.why or None,
        "plan": list(map(dict, decision.patches)),
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
    lines = []
    for how, ranks in by_how.items():
        lines.append(f"{ranks_in_words(ranks)}: {_HOWS.get(how, how)}")
    hows = "; ".join(lines)
    notes = [f"{size} ranks. {hows}"]
    if decision.first is not None:
        if decision.is_order_known:
            known = ""
        else:
            known = (
                " (the clocks cannot order the failures; it had the least free memory, or the "
                "lowest number)"
            )
        notes.append(f"first: rank {decision.first}{known}")
    if decision.absent:
        notes.append(absent_in_words(decision))
    return tuple(notes)


# Import the modules of an agreement only when one is needed, so that the command starts at once.


class RankCoordinator:
    """Coordinate one rank; implements the coordinator and the companion of a run.

    Args:
        rendezvous: the place where the ranks meet.
        timeout_s: time for all ranks to report their result after the first failure, in seconds.
        end: ends the command. It takes an event that is set when the attempt is over.
        claim: the lock of this rank.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        end: Callable[[threading.Event], None],
        claim: RankLock,
    ) -> None:
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._end = end
        self._claim = claim
        self._meeting: RankBarrier | None = None
        self._mirror: StoreMirror | None = None
        self._watch: RankMonitor | None = None
        self._ended: TerminationReason | None = None
        self._why_off: str | None = None
        self._ends_badly: Callable[[], bool] | None = None

    @property
    def is_reporter(self) -> bool:
        """Whether this rank reports the job and writes its journal in the normal case."""
        return self._rendezvous.launched.rank == LEADER

    def began(self, number: int, launch: Launch, _pid: int | None) -> None:
        """Start to watch the other ranks, after the command has started."""
        self._why_off = self._why_off or self._rendezvous.problem
        if self._why_off is None:
            self._ended = None
            self._watch = RankMonitor(
                lambda: self._meeting or self._met(launch), number, self._end, self._why_apart
            )

    def ended(self, _attempt: Attempt) -> None:
        """Ignore the end of an attempt, which ``agree`` handles."""

    def ended_by_us(self) -> TerminationReason | None:
        """Stop watching; return why the last attempt was ended for another rank, or None."""
        watch = self._watch
        self._watch = None
        if watch is not None:
            self._ended = watch.stop()
            self._meeting = watch.meeting
            if watch.problem is not None:
                self._off(watch.problem)
        return self._ended

    def stopped(self, number: int, status: int) -> None:
        """Report to the other ranks that a signal ended an attempt."""
        self.ended_by_us()
        if self._meeting is None or self._why_off is not None:
            return
        try:
            self._meeting.update(number=number, state="ended", end=stopped_end(number, status))
        except OSError as error:
            self._off(error.strerror or str(error))

    def agree(self, own: AttemptReport, stopped: Callable[[], bool]) -> Verdict:
        """Return what all ranks do after an attempt, or None if this rank decides alone."""

        self.ended_by_us()
        decision = None
        meeting = self._meeting
        docs = dict[int, RankMessage]()
        if meeting is not None and self._why_off is None:
            try:
                if stopped():
                    # The stop may have come during the diagnosis.
                    self.stopped(own.number, own.status)
                    return Verdict(own.diagnosis)
                end = rank_end(own, self._ended)
                again = self._rendezvous.again
                decision = AgreementRound(meeting, end, self._timeout_s, stopped, again).decision()
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
        """Wait until all ranks are ready for the next attempt; return whether to start it."""
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
            get_logger().error("not run again: a rank never restarts without the others", why=why)
        return why is None

    def close(self) -> None:
        """Leave the other ranks."""

        self.ended_by_us()
        if self._meeting is not None and self._why_off is None:
            # The last rank removes the folder.
            with contextlib.suppress(OSError):
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
        # otherwise the folder does not answer
        elif self._meeting is not None or self._why_off is None:
            self._claim.remove_where_last()

    def _met(self, launch: Launch) -> RankBarrier:
        own = self._rendezvous.launched
        place = self._rendezvous
        folder = MessageFolder(place.folder)
        if place.mirrors:
            from oomguard.cluster.ranks.rendezvous import StoreMirror

            self._mirror = StoreMirror(place, folder, launch.argv)
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
        return RankBarrier(folder, own.rank, own.size, self._claim)

    def _why_apart(self) -> str | None:
        if self._mirror is None:
            return None
        return self._mirror.why_apart()

    def _agreed(
        self, decision: Decision, docs: Mapping[int, RankMessage], own: AttemptReport
    ) -> Verdict:
        from oomguard.cluster.ranks.decision import is_change_left, log_repeated_effects
        from oomguard.journal.codec import patch_of

        rank = self._rendezvous.launched.rank
        size = self._rendezvous.launched.size
        is_reported = rank == LEADER or LEADER not in docs or LEADER in decision.absent
        diagnosis = merged_diagnosis(
            decision, reported_ends(docs, own.number), own.diagnosis, rank, size
        )
        if is_reported and own.number > 1 and starts_once(own.tail):
            hint = "put oomguard around the launcher: oomguard run -- mpirun …"
            get_logger().error(
                "the program cannot restart under its launcher, which allows MPI_Init only once",
                hint=hint,
            )
        if decision.absent and is_reported:
            if self._mirror is None:
                problem = None
            else:
                problem = self._mirror.problem()
            if problem is None:
                extra = {}
            else:
                extra = {"mirror": problem}
            if len(docs) < size:
                extra["hint"] = (
                    "start each rank with its own oomguard run; --rendezvous none runs each rank "
                    "alone"
                )
            if decision.silent or decision.first is not None:
                then = ": no rank restarts"
            else:
                then = ""
            # The other ranks report only errors.
            tell = get_logger().error if decision.silent or rank != LEADER else get_logger().warning
            tell(f"{absent_in_words(decision)}{then}", **extra)
        elif decision.why and decision.first is not None and is_reported:
            get_logger().warning(f"no rank restarts: {decision.why}")
        elif decision.again and is_reported:
            log_repeated_effects(reported_ends(docs, own.number))
            if (why := self._why_apart()) is not None and len(
                {doc.host for doc in docs.values()}
            ) == 1:
                get_logger().warning(
                    "all ranks are on this host and meet there without their store", reason=why
                )
        patches = tuple(map(patch_of, decision.patches))
        again = patches if decision.again else ()
        left = patches if decision.is_exhausted else ()
        is_left = is_change_left(decision, reported_ends(docs, own.number))
        return Verdict(
            diagnosis,
            again,
            decision.variables,
            decision_record(decision, size),
            is_reported,
            left,
            is_left,
        )

    def _off(self, why: str) -> None:
        self._why_off = why
        get_logger().error("the ranks cannot meet, so no rank restarts automatically", reason=why)


def stopped_end(number: int, status: int) -> RankEnd:
    """Return the result of an attempt that a signal to this rank's oomguard ended.

    The other ranks then neither wait for it nor blame it.
    """
    return RankEnd(number, "stopped", status, status_in_words(status))


def rank_end(own: AttemptReport, ended: TerminationReason | None) -> RankEnd:
    """Return the result of this rank's attempt in the form that the other ranks read."""
    from oomguard.cluster.ranks.decision import is_secondary, policy_row, side_effects_row
    from oomguard.report.json import patch_dict

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
    patches = tuple(map(patch_dict, own.patches))
    failed_s = own.failed_s if is_oom else None
    did = own.did
    effects = (
        side_effects_row(did.seen),
        did.idempotent,
        did.own_files,
        policy_row(did.policy, did.chosen),
    )
    return RankEnd(
        own.number, how, own.status, own.error, row, patches, own.refusal, failed_s, *effects
    )


# Watch the other ranks while the command runs, and end it if another rank ran out of memory.
#
# Without this, a command whose peer has died may wait in a collective until its timeout, or
# forever.


# Intervals between looks: short at first, so that ranks meet soon. Later they are long enough that
# a thousand ranks put little load on the folder.
_MEETING_PAUSE_S: Final = 0.1
# A failed peer leaves the others hanging in a collective, so seconds do not matter.
_WATCH_PAUSE_S: Final = 0.5
# Do not wait longer for a network file system.
_ANSWER_S: Final = 5.0


class RankMonitor:
    """Watch the other ranks during one attempt, in a thread.

    A file system that does not answer then blocks nothing else.

    Args:
        meet: returns the meeting of the ranks, and raises OSError if they cannot meet.
        number: the number of the attempt.
        end: ends the command. It takes an event that is set when the attempt is over.
        why_apart: returns why ranks of other hosts cannot be reached, or None while they may come.

    Attributes:
        meeting: the meeting, or None until the ranks can meet.
        problem: why the ranks cannot meet, or None if they can.
    """

    def __init__(
        self,
        meet: Callable[[], RankBarrier],
        number: int,
        end: Callable[[threading.Event], None],
        why_apart: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._meet = meet
        self._number = number
        self._end = end
        self._why_apart = why_apart
        self.meeting: RankBarrier | None = None
        self.problem: str | None = None
        self._over = threading.Event()
        self._ended: TerminationReason | None = None
        self._thread = threading.Thread(target=self._run, name="oomguard-ranks", daemon=True)
        self._thread.start()

    def stop(self) -> TerminationReason | None:
        """Stop watching; return why the command was ended, or None."""
        self._over.set()
        self._thread.join(_ANSWER_S)
        if self._thread.is_alive():
            self.meeting = None
            self.problem = f"the folder where they meet did not answer within {_ANSWER_S:g} s"
        return self._ended

    def _run(self) -> None:
        try:
            self.meeting = self._meet()
            self.meeting.update(number=self._number, state="running")
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        pause_s = _MEETING_PAUSE_S
        is_reported = False
        while not self._over.wait(pause_s):
            try:
                docs = self.meeting.look()
            except ContestedError as error:
                self.problem = str(error)
                self._ended = TerminationReason(f"ended: {error}")
                self._end(self._over)
                return
            except OSError as error:
                # A network file system may fail for a moment. The next look tries again.
                get_logger().debug("the ranks cannot be read", reason=error.strerror or str(error))
                pause_s = _WATCH_PAUSE_S
                continue
            missing = self.meeting.missing()
            if not missing:
                pause_s = max(_WATCH_PAUSE_S, self.meeting.size / _RANKS_A_PAUSE)
            elif not is_reported and (why_apart := self._why_apart()) is not None:
                # They may run on this host and start later.
                is_reported = True
                if len(missing) == 1:
                    are = "is"
                else:
                    are = "are"
                what = (
                    f"{ranks_in_words(missing)} {are} not met yet, and no rank restarts without "
                    "the others"
                )
                get_logger().error(what, reason=why_apart)
            why = self._why_to_end(docs, self.meeting.lost())
            if why is not None and not self._over.is_set():
                self._ended = TerminationReason(why)
                self._end(self._over)
                return

    def _why_to_end(self, docs: dict[int, RankMessage], lost: set[int]) -> str | None:
        caller = find_failed_peer(docs, self._number)
        if caller is not None:
            end = docs[caller].end
            if end is not None and end.calls_for_another:
                then = " and all ranks restart"
            else:
                then = ""
            return f"ended because {ranks_in_words([caller])} ran out of memory{then}"
        # A stopped rank has reported its end, although it may have had no time to leave.
        killed = set()
        for rank in lost:
            end = docs[rank].end if rank in docs else None
            if end is None or end.how != "stopped":
                killed.add(rank)
        if killed:
            return f"ended because {ranks_in_words(killed)} was killed"
        never_began = set()
        for rank, doc in docs.items():
            if doc.state == "left" and doc.number < self._number:
                never_began.add(rank)
        if never_began:
            return f"ended because {ranks_in_words(never_began)} did not restart"
        return None


def find_failed_peer(docs: dict[int, RankMessage], number: int) -> int | None:
    """Return a rank whose failure ends the attempt for all ranks, or None."""
    for rank, doc in sorted(docs.items()):
        if doc.end and doc.end.number == number and doc.end.ends_all:
            return rank
    return None
