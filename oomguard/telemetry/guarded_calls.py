"""Count guarded calls that ran out of memory, and make spans of them.

Calls are counted if metrics are enabled. Spans are made if the program has a tracer. A call that
succeeds at once costs nothing. This module never imports OpenTelemetry; a program with a tracer has
already done so.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakSet

from oomguard.core.errors import SettingError
from oomguard.core.incident import Attempt
from oomguard.core.installation import __version__
from oomguard.core.log import get_plain_logger
from oomguard.telemetry.metrics import Exporter, Tally, require_library
from oomguard.telemetry.spans import CALL, INCIDENT, of_incident, of_settings, table

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


# The tallies that count this process's calls, one for each registry.
tallies: Final[list[Tally]] = []
_TRACE: Final = "opentelemetry.trace"


class SpanAttempt(NamedTuple):
    """Hold an attempt of a call, with its start and end in Unix nanoseconds as spans use them."""

    attempt: Attempt
    began_ns: int
    ended_ns: int


_tried: ContextVar[tuple[SpanAttempt, ...]] = ContextVar("oomguard_tried", default=())


def count_attempt(attempt: Attempt) -> None:
    """Count an attempt that ended, of a call that has run out of memory."""
    if attempt.incident is None and attempt.number == 1:
        return
    for tally in tallies:
        tally.began(attempt.patches, is_relaunch=attempt.number > 1)
        tally.ended(attempt)
    _trace(attempt, attempt.seconds)


def count_death(before: Attempt, now: Attempt) -> None:
    """Count the death of an engine that had started successfully, with its working time."""
    for tally in tallies:
        # An attempt that succeeds at once is not counted.
        if before.number == 1:
            tally.began(now.patches, is_relaunch=False)
        tally.ended(replace(now, seconds=0.0))
    _trace(now, 0.0)


def end_call() -> None:
    """Make a span of the call's attempts, if it had any."""
    tried = _tried.get()
    if tried:
        _tried.set(())
        try:
            make_span(tried)
        except Exception:
            logger = get_plain_logger()
            logger.exception("the span of a guarded call failed")


def _trace(attempt: Attempt, seconds: float) -> None:
    if _TRACE in sys.modules:
        now_ns = time.time_ns()
        _tried.set((*_tried.get(), SpanAttempt(attempt, now_ns - round(seconds * 1e9), now_ns)))


# A call that ran out of memory is one span below the program's current span.


def make_span(tried: Sequence[SpanAttempt]) -> None:
    """Make the span of the attempts in order of time; its status is the last attempt's."""
    from opentelemetry import trace

    from oomguard.core.presentable import drawn

    last = tried[-1].attempt
    attributes = {"oomguard.attempts": len(tried), **of_settings(last)}
    tracer = trace.get_tracer(table()["scope"], __version__)
    span = tracer.start_span(CALL, attributes=attributes, start_time=tried[0].began_ns)
    for attempt, _, ended_ns in tried:
        if attempt.incident is not None:
            span.add_event(INCIDENT, of_incident(attempt.incident, attempt.number), ended_ns)
    if not last.succeeded:
        if last.incident is not None:
            why = last.incident.headline
        else:
            why = last.error
        span.set_status(trace.StatusCode.ERROR, drawn(why))
    span.end(tried[-1].ended_ns)


# ``oomguard.enable_metrics`` counts the guarded calls of this process in the program's own
# registry.

_enabled: WeakSet[CollectorRegistry] = WeakSet()
_lock = threading.Lock()


def enable_metrics(registry: CollectorRegistry | None = None) -> None:
    """Count the guarded calls of this process for prometheus-client (the extra ``metrics``).

    ```python
    oomguard.enable_metrics()
    prometheus_client.start_http_server(9400)
    ```

    It counts calls that run out of memory from now on: their attempts, incidents and changes. A
    call that succeeds costs nothing. Enabling the same registry again has no effect.

    Args:
        registry: the registry of the metrics. None (default): prometheus-client's default registry.

    Raises:
        UsageError: prometheus-client is not installed.
        SettingError: ``registry`` is not a registry.
        ValueError: the registry already has metrics of these names.
    """
    require_library()
    from prometheus_client import REGISTRY, CollectorRegistry

    if registry is None:
        chosen = REGISTRY
    else:
        chosen = registry
    if not isinstance(chosen, CollectorRegistry):
        raise SettingError(
            f"registry must be a prometheus_client.CollectorRegistry, got {chosen!r}",
            hint="enable_metrics() without an argument uses prometheus-client's default registry",
        )
    with _lock:
        if chosen not in _enabled:
            tally = Tally()
            chosen.register(Exporter(tally, {"process"}))
            tallies.append(tally)
            _enabled.add(chosen)
