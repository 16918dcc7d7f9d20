"""After an attempt: all ranks say how it ended, rank 0 decides for all, and all start again or
none.

No rank waits longer than the deadline after the first failure. A rank that has not said by then how
its attempt ended is silent, and with a silent rank none starts again: it would wait in its first
collective for one that does not come. Where rank 0 itself is silent, each rank ends by itself; only
rank 0 ever decides to start again, so two can never decide differently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from oomguard.cluster.ranks.barrier import LEADER, Meeting
from oomguard.cluster.ranks.clock import Offset
from oomguard.cluster.ranks.decision import decide, ranks_in_words
from oomguard.cluster.ranks.messages import Decision, RankEnd, Said
from oomguard.cluster.ranks.watch_ranks import calling

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
