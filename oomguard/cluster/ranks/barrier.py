"""Let the ranks of one job meet: verify whose messages belong to this job, and detect lost ranks.

The folder may hold messages of an earlier job, and a rank may come late. So each rank shows a
random nonce. Rank 0 lists the nonces that it read. A rank that finds its own nonce in the list
knows that rank 0's message is current, and answers with rank 0's nonce. Rank 0 has then met that
rank. The other ranks trust each other only after rank 0 has met them.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from dataclasses import replace
from typing import Any, Final

from oomguard.cluster.ranks import clock
from oomguard.cluster.ranks.messages import MessageFolder, RankMessage, parse_message
from oomguard.cluster.ranks.rank_lock import ContestedError, RankLock

LEADER: Final = 0
# A rank on another host is silent if its message has not changed for this long.
BEAT_S: Final = 5.0
SILENT_S: Final = 6 * BEAT_S


class RankBarrier:
    """Exchange messages with the other ranks.

    Args:
        folder: the folder of messages.
        rank: the number of this rank.
        size: the number of ranks.
        claim: the lock of this rank, or None if it holds none.
    """

    def __init__(
        self, folder: MessageFolder, rank: int, size: int, claim: RankLock | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._claim = claim
        self._lock = threading.Lock()
        self._own = RankMessage(
            rank, uuid.uuid4().hex, host=clock.host_identity(), pid=clock.own_pid()
        )
        self._written_s = self._beaten_s = 0.0
        self._first_written_s: float | None = None
        self._heard: dict[str, tuple[str, float]] = {}
        self._beats: dict[int, tuple[tuple[str, int], float]] = {}
        self._others: dict[int, RankMessage] = {}

    @property
    def own(self) -> RankMessage:
        """The message of this rank."""
        return self._own

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides for all."""
        return self.rank == LEADER

    def update(self, **changes: Any) -> None:
        """Change some fields of this rank's message.

        Raises:
            OSError: the message cannot be written.
        """
        with self._lock:
            self._say(**changes)

    def look(self) -> dict[int, RankMessage]:
        """Read the messages, and return those that belong to this job, by rank.

        Raises:
            ContestedError: another job uses the same folder.
            OSError: a message cannot be read, or this rank's message cannot be written.
        """
        if self._claim is not None and (why := self._claim.contested()) is not None:
            raise ContestedError(why)
        with self._lock:
            texts = self._folder.read()
            # without its lock, the last rank may remove the folder
            has_left = self._own.state == "left"
            is_there = self._own.to_text() == texts.pop(self.rank, None)
            if self._first_written_s is not None and not is_there and not has_left:
                # The last rank of an earlier job removed it.
                self._folder.write(self.rank, self._own.to_text())
            found = {
                rank: doc
                for rank, text in texts.items()
                if (doc := parse_message(text)) is not None
            }
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
        """Return the ranks on this host whose process has died without leaving first."""
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
        """Return the ranks that were not met, or did not change their message, for long."""
        now_s = clock.now_s()
        quiet = {rank for rank, (_, at_s) in self._beats.items() if now_s - at_s > SILENT_S}
        met = {
            rank for rank in quiet if (doc := self._others.get(rank)) is None or doc.state != "left"
        }
        return met | (self.missing() if self.age_s() > SILENT_S else set())

    def age_s(self) -> float:
        """Return the seconds since this rank wrote its first message."""
        if self._first_written_s is None:
            return 0.0
        return clock.now_s() - self._first_written_s

    def missing(self) -> set[int]:
        """Return the ranks that were never met."""
        return set(range(self.size)) - {self.rank} - set(self._others)

    def leave(self) -> None:
        """Announce that this rank leaves the job."""
        with contextlib.suppress(OSError):
            self.update(state="left")

    def withdraw(self) -> None:
        """Remove this rank's message if it can no longer be written.

        A late reader of the old message would think that the process was killed.
        """
        with contextlib.suppress(OSError):
            self._folder.withdraw(self.rank)

    def tidy(self) -> None:
        """Remove the folder if this is the last rank that uses it."""
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

    def _as_leader(self, others: dict[int, RankMessage]) -> dict[int, RankMessage]:
        for rank, doc in others.items():
            if self._heard.get(str(rank), ("", 0.0))[0] != doc.nonce:
                self._heard[str(rank)] = doc.nonce, clock.now_s()
        valid = {rank: doc for rank, doc in others.items() if doc.of_leader == self._own.nonce}
        self._say(
            heard=dict(self._heard),
            met={str(rank): doc.nonce for rank, doc in sorted(valid.items())},
        )
        return valid

    def _as_follower(self, others: dict[int, RankMessage]) -> dict[int, RankMessage]:
        leader = others.get(LEADER)
        if leader is None or self._first_written_s is None:
            return {}
        own_nonce, seen_s = leader.heard.get(str(self.rank), ("", 0.0))
        if own_nonce != self._own.nonce:
            return {}
        if self._own.of_leader != leader.nonce:
            at = clock.clock_offset(
                self._own.host, leader.host, self._first_written_s, seen_s, clock.now_s()
            )
            self._say(of_leader=leader.nonce, offset_s=at.offset_s, slack_s=at.slack_s)
        met = {rank: doc for rank, doc in others.items() if leader.met.get(str(rank)) == doc.nonce}
        return {**met, LEADER: leader}
