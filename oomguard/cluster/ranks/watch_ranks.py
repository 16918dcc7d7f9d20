"""While a rank's command runs: meet the others, and end the command where another rank ran out of
memory.

A command whose peer has died may wait for it in a collective for as long as its timeout says,
minutes or for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from oomguard.analyst.outcome import TerminationReason
from oomguard.cluster.ranks.barrier import Meeting
from oomguard.cluster.ranks.decision import ranks_in_words
from oomguard.cluster.ranks.messages import Said
from oomguard.cluster.ranks.rank_lock import ContestedError
from oomguard.core.log import get_logger

# How often a rank looks: soon at first, as it has to meet the others, then seldom enough that a
# thousand ranks are no load.
_MEETING_PAUSE_S: Final = 0.1
_PAUSE_S: Final = 0.5
_RANKS_A_PAUSE: Final = 512
# A network's file system that takes longer is not waited for.
_ANSWER_S: Final = 5.0


class RankMonitor:
    """Looks at the other ranks during one attempt, in a thread: a file system that does not answer
    holds nothing else up.

    Args:
        meet: returns the ranks' meeting, and raises OSError where they cannot meet.
        number: the attempt.
        end: ends the command; it gets what is set when the attempt is over.
        why_apart: returns why the ranks of other hosts cannot be met; None while they can, or may
            be yet.

    Attributes:
        meeting: the ranks, once they can meet.
        problem: why they cannot; None where they can.
    """

    def __init__(
        self,
        meet: Callable[[], Meeting],
        number: int,
        end: Callable[[threading.Event], None],
        why_apart: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._meet = meet
        self._number = number
        self._end = end
        self._why_apart = why_apart
        self.meeting: Meeting | None = None
        self.problem: str | None = None
        self._over = threading.Event()
        self._ended: TerminationReason | None = None
        self._thread = threading.Thread(target=self._run, name="oomguard-ranks", daemon=True)
        self._thread.start()

    def stop(self) -> TerminationReason | None:
        """Look no more; return why the command was ended, None where it was not."""
        self._over.set()
        self._thread.join(_ANSWER_S)
        if self._thread.is_alive():
            self.meeting = None
            self.problem = f"the folder where they meet has not answered for {_ANSWER_S:g} s"
        return self._ended

    def _run(self) -> None:
        try:
            self.meeting = self._meet()
            self.meeting.say(number=self._number, state="running")
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        pause_s = _MEETING_PAUSE_S
        is_told = False
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
            elif not is_told and (why_apart := self._why_apart()) is not None:
                is_told = True  # they may be on this host and only start later
                if len(missing) == 1:
                    are = "is"
                else:
                    are = "are"
                what = (
                    f"{ranks_in_words(missing)} {are} not met yet, and no rank starts again "
                    "without the others"
                )
                get_logger().error(what, reason=why_apart)
            why = self._why_to_end(docs, self.meeting.lost())
            if why is not None and not self._over.is_set():
                self._ended = TerminationReason(why)
                self._end(self._over)
                return

    def _why_to_end(self, docs: dict[int, Said], lost: set[int]) -> str | None:
        caller = calling(docs, self._number)
        if caller is not None:
            end = docs[caller].end
            if end is not None and end.calls_for_another:
                then = " and all ranks start again"
            else:
                then = ""
            return f"ended, as {ranks_in_words([caller])} ran out of memory{then}"
        if lost:
            return f"ended, as {ranks_in_words(lost)} is gone: its process was killed"
        never_began = {
            rank for rank, doc in docs.items() if doc.state == "left" and doc.number < self._number
        }
        if never_began:
            return f"ended, as {ranks_in_words(never_began)} did not start again"
        return None


def calling(docs: dict[int, Said], number: int) -> int | None:
    """Return a rank whose failure in an attempt ends that of all; None where there is none."""
    called = (
        rank
        for rank, doc in sorted(docs.items())
        if doc.end and doc.end.number == number and doc.end.ends_all
    )
    return next(called, None)
