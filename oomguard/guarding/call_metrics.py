"""Report failed guarded calls to the metrics and spans of ``telemetry``, if it is installed.

A call that succeeds at once is not reported, so it loads nothing.
"""

from __future__ import annotations

import functools
from typing import Protocol, cast

from oomguard.core.extensions import extension
from oomguard.core.incident import Attempt


class CallMetrics(Protocol):
    """Counts the attempts of guarded calls, or makes spans of them."""

    def count_attempt(self, attempt: Attempt) -> None:
        """Count an attempt that ended."""

    def count_death(self, before: Attempt, now: Attempt) -> None:
        """Count the death of an engine that had started successfully."""

    def end_call(self) -> None:
        """Close the span of a call."""


class _NoCallMetrics:
    """Counts nothing: telemetry is not installed."""

    def count_attempt(self, attempt: Attempt) -> None:
        """Ignore an attempt."""

    def count_death(self, before: Attempt, now: Attempt) -> None:
        """Ignore the death of an engine."""

    def end_call(self) -> None:
        """Ignore the end of a call."""


@functools.cache
def _call_metrics() -> CallMetrics:
    module = extension("call_metrics")
    if module is None:
        return _NoCallMetrics()
    return cast("CallMetrics", module)


def report_attempt(attempt: Attempt) -> None:
    """Report an attempt that ended, unless it was the first of a call and succeeded."""
    if attempt.incident is None and attempt.number == 1:
        return
    _call_metrics().count_attempt(attempt)


def report_death(before: Attempt, now: Attempt) -> None:
    """Report the death of an engine; ``before`` is the attempt that started it successfully."""
    _call_metrics().count_death(before, now)


def report_end_of_call() -> None:
    """Report the end of a call; without a reported attempt there is no span to close."""
    if _call_metrics.cache_info().currsize:
        _call_metrics().end_call()
