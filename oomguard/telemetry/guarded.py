"""What the guard tells of calls that ran out of memory: counted where metrics are enabled, a span where the program has a tracer.

A call that succeeds is not told of, and costs nothing. OpenTelemetry is never imported here: a program that traces has done so.
"""

from __future__ import annotations

import sys
import time
from contextvars import ContextVar
from dataclasses import replace
from typing import Final, NamedTuple

from oomguard.incident import Attempt
from oomguard.log import get_plain_logger
from oomguard.telemetry.tally import Tally

# Where the calls of this process are counted: one tally for each registry that was enabled.
tallies: Final[list[Tally]] = []
_TRACE: Final = "opentelemetry.trace"


class Tried(NamedTuple):
    """An attempt of a call, with Unix times in nanoseconds as spans have them."""

    attempt: Attempt
    began_ns: int
    ended_ns: int


_tried: ContextVar[tuple[Tried, ...]] = ContextVar("oomguard_tried", default=())


def attempted(attempt: Attempt) -> None:
    """Take an attempt that ended, of a call that has run out of memory, now or before."""
    if attempt.incident is None and attempt.number == 1:
        return
    for tally in tallies:
        tally.began(attempt.patches, is_relaunch=attempt.number > 1)
        tally.ended(attempt)
    _trace(attempt, attempt.seconds)


def died(before: Attempt, now: Attempt) -> None:
    """Take the death of an engine whose start had ended well; how long it had worked is not lost."""
    for tally in tallies:
        if before.number == 1:  # one that succeeds at once is not counted
            tally.began(now.patches, is_relaunch=False)
        tally.ended(replace(now, seconds=0.0))
    _trace(now, 0.0)


def call_ended() -> None:
    """Take the end of a call: what was tried is one span."""
    tried = _tried.get()
    if tried:
        _tried.set(())
        try:
            from oomguard.telemetry.call_span import tell

            tell(tried)
        except Exception:
            logger = get_plain_logger()
            logger.exception("the span of a guarded call failed")


def _trace(attempt: Attempt, seconds: float) -> None:
    if _TRACE in sys.modules:
        now_ns = time.time_ns()
        _tried.set((*_tried.get(), Tried(attempt, now_ns - round(seconds * 1e9), now_ns)))
