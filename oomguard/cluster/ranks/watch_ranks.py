"""Watch the other ranks while the command runs, and end it if another rank ran out of memory.

Without this, a command whose peer has died may wait in a collective until its timeout, or forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from oomguard.analyst.outcome import TerminationReason
from oomguard.cluster.ranks.barrier import RankBarrier
from oomguard.cluster.ranks.decision import ranks_in_words
from oomguard.cluster.ranks.messages import RankMessage
from oomguard.cluster.ranks.rank_lock import ContestedError
from oomguard.core.log import get_logger

# Intervals between looks: short at first, so that ranks meet soon. Later they are long enough that
# a thousand ranks put little load on the folder.
_MEETING_PAUSE_S: Final = 0.1
_PAUSE_S: Final = 0.5
_RANKS_A_PAUSE: Final = 512
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
                get_logger().debug("the ranks cannot be read", reason=error.strerror or str(error))
                pause_s = _PAUSE_S
                continue
            missing = self.meeting.missing()
            if not missing:
                pause_s = max(_PAUSE_S, self.meeting.size / _RANKS_A_PAUSE)
            elif not is_reported and (why_apart := self._why_apart()) is not None:
                is_reported = True  # they may run on this host and start later
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
        if lost:
            return f"ended because {ranks_in_words(lost)} was killed"
        never_began = {
            rank for rank, doc in docs.items() if doc.state == "left" and doc.number < self._number
        }
        if never_began:
            return f"ended because {ranks_in_words(never_began)} did not restart"
        return None


def find_failed_peer(docs: dict[int, RankMessage], number: int) -> int | None:
    """Return a rank whose failure ends the attempt for all ranks, or None."""
    called = (
        rank
        for rank, doc in sorted(docs.items())
        if doc.end and doc.end.number == number and doc.end.ends_all
    )
    return next(called, None)
