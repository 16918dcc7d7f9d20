"""The ranks of one job meet: whose document is of this job, and which rank is lost.

A folder may hold documents of an earlier job, and a rank may come late. Rank 0 lists the nonce that
each rank shows; a rank that finds its own there knows that rank 0's document is of now, and answers
with rank 0's nonce; a rank that has answered is met. All others are believed only as far as rank 0
has met them.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from dataclasses import replace
from typing import Any, Final

from oomguard.cluster.ranks import clock
from oomguard.cluster.ranks.messages import Folder, Said, said
from oomguard.cluster.ranks.rank_lock import Claim, ContestedError

LEADER: Final = 0
# A rank of another host whose document has not changed for so long is silent.
BEAT_S: Final = 5.0
SILENT_S: Final = 6 * BEAT_S


class Meeting:
    """What this rank says, and what the others do.

    Args:
        folder: where the documents lie.
        rank: this one.
        size: how many there are.
        claim: this rank's, None where it has none.
    """

    def __init__(self, folder: Folder, rank: int, size: int, claim: Claim | None = None) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._claim = claim
        self._lock = threading.Lock()
        self._own = Said(rank, uuid.uuid4().hex, host=clock.host(), pid=clock.own_pid())
        self._written_s = self._beaten_s = 0.0
        self._first_written_s: float | None = None
        self._heard: dict[str, tuple[str, float]] = {}
        self._beats: dict[int, tuple[tuple[str, int], float]] = {}
        self._others: dict[int, Said] = {}

    @property
    def own(self) -> Said:
        """This rank's document."""
        return self._own

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides."""
        return self.rank == LEADER

    def say(self, **changes: Any) -> None:
        """Change this rank's document. Raises OSError where it cannot be written."""
        with self._lock:
            self._say(**changes)

    def look(self) -> dict[int, Said]:
        """Read the others, and return the documents that are of this job, by rank, with this rank's
        own.

        Raises:
            ContestedError: nobody knows which they are.
            OSError: they cannot be read, or this rank's cannot be written.
        """
        if self._claim is not None and (why := self._claim.contested()) is not None:
            raise ContestedError(why)
        with self._lock:
            texts = self._folder.read()
            has_left = self._own.state == "left"  # then the last rank may remove it
            is_there = self._own.to_text() == texts.pop(self.rank, None)
            if self._first_written_s is not None and not is_there and not has_left:
                self._folder.write(
                    self.rank, self._own.to_text()
                )  # an earlier job's last rank removed it
            found = {rank: doc for rank, text in texts.items() if (doc := said(text)) is not None}
            others = {
                rank: doc for rank, doc in found.items() if rank < self.size and doc.rank == rank
            }
            if self.is_leader:
                valid = self._as_leader(others)
            else:
                valid = self._as_follower(others)
            now_s = clock.now_s()
            for rank, doc in valid.items():
                beat = doc.nonce, doc.beat
                if self._beats.get(rank, (None, 0.0))[0] != beat:
                    self._beats[rank] = beat, now_s
            if (now_s - self._beaten_s > BEAT_S and not has_left) or self._first_written_s is None:
                self._beaten_s = now_s
                self._say(beat=self._own.beat + 1)
            self._others = valid
            return {**valid, self.rank: self._own}

    def lost(self) -> set[int]:
        """Return the ranks whose process is gone for certain: it was on this host. One that said
        that it leaves is not lost.
        """
        ids = self._own.host[0]
        return {
            rank
            for rank, doc in self._others.items()
            if doc.state != "left"
            and ids
            and doc.host[0] == ids
            and clock.started_s(doc.pid[0]) != doc.pid[1]
        }

    def silent(self) -> set[int]:
        """Return the ranks whose document has not changed for long, or that were not met for as
        long.
        """
        now_s = clock.now_s()
        quiet = {rank for rank, (_, at_s) in self._beats.items() if now_s - at_s > SILENT_S}
        met = {
            rank for rank in quiet if (doc := self._others.get(rank)) is None or doc.state != "left"
        }
        return met | (self.missing() if self.age_s() > SILENT_S else set())

    def age_s(self) -> float:
        """Return how long ago this rank first said anything."""
        if self._first_written_s is None:
            return 0.0
        return clock.now_s() - self._first_written_s

    def missing(self) -> set[int]:
        """Return the ranks that were never met."""
        return set(range(self.size)) - {self.rank} - set(self._others)

    def leave(self) -> None:
        """Say that this rank has nothing more to do with the job."""
        with contextlib.suppress(OSError):
            self.say(state="left")

    def withdraw(self) -> None:
        """Take this rank's document back, as it cannot be written any more: who reads it late would
        think that its process was killed.
        """
        with contextlib.suppress(OSError):
            self._folder.withdraw(self.rank)

    def tidy(self) -> None:
        """Remove the folder where this is the last rank that sees it."""
        with contextlib.suppress(OSError):
            docs = self.look()
            here = self._folder.written_here()
            is_last = self._claim is None or self._claim.is_last()
            if is_last and all(docs[rank].state == "left" for rank in here & set(docs)):
                self._folder.remove()

    def _say(self, **changes: Any) -> None:
        changed = replace(self._own, **changes)
        if changed != self._own or self._first_written_s is None:
            self._own = changed
            self._written_s = clock.now_s()
            self._first_written_s = self._first_written_s or self._written_s
            self._folder.write(self.rank, changed.to_text())

    def _as_leader(self, others: dict[int, Said]) -> dict[int, Said]:
        for rank, doc in others.items():
            if self._heard.get(str(rank), ("", 0.0))[0] != doc.nonce:
                self._heard[str(rank)] = doc.nonce, clock.now_s()
        valid = {rank: doc for rank, doc in others.items() if doc.of_leader == self._own.nonce}
        self._say(
            heard=dict(self._heard),
            met={str(rank): doc.nonce for rank, doc in sorted(valid.items())},
        )
        return valid

    def _as_follower(self, others: dict[int, Said]) -> dict[int, Said]:
        leader = others.get(LEADER)
        if leader is None or self._first_written_s is None:
            return {}
        own_nonce, seen_s = leader.heard.get(str(self.rank), ("", 0.0))
        if own_nonce != self._own.nonce:
            return {}
        if self._own.of_leader != leader.nonce:
            at = clock.offset(
                self._own.host, leader.host, self._first_written_s, seen_s, clock.now_s()
            )
            self._say(of_leader=leader.nonce, offset_s=at.offset_s, slack_s=at.slack_s)
        met = {rank: doc for rank, doc in others.items() if leader.met.get(str(rank)) == doc.nonce}
        return {**met, LEADER: leader}
