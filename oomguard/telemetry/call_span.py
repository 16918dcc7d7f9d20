"""A guarded call that ran out of memory, as one span below the one that the program has open."""

from __future__ import annotations

from collections.abc import Sequence

from oomguard._version import __version__
from oomguard.telemetry.attributes import CALL, INCIDENT, of_incident, of_settings, table
from oomguard.telemetry.guarded import Tried


def tell(tried: Sequence[Tried]) -> None:
    """Make the span of what was tried, in the order of time; its status is the last attempt's."""
    from opentelemetry import trace

    from oomguard.report.presentable import drawn

    last = tried[-1].attempt
    attributes = {"oomguard.attempts": len(tried), **of_settings(last)}
    tracer = trace.get_tracer(table()["scope"], __version__)
    span = tracer.start_span(CALL, attributes=attributes, start_time=tried[0].began_ns)
    for attempt, _, ended_ns in tried:
        if attempt.incident is not None:
            span.add_event(INCIDENT, of_incident(attempt.incident, attempt.number), ended_ns)
    if not last.succeeded:
        why = last.incident.headline if last.incident is not None else last.error
        span.set_status(trace.StatusCode.ERROR, drawn(why))
    span.end(tried[-1].ended_ns)
