"""What goes along with a run and tells it as spans: one for the run, one below for each attempt, an event for each incident."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from oomguard._version import __version__
from oomguard.engines.command import Launch
from oomguard.incident import Attempt, Patch
from oomguard.telemetry.attributes import ATTEMPT, INCIDENT, RUN, of_attempt, of_incident, table

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

# Where one process hands its trace on to the next (https://opentelemetry.io/docs/specs/otel/context/env-carriers/).
_CARRIED: Final = ("traceparent", "tracestate")


class RunSpans:
    """Tells one run.

    Args:
        provider: gives the tracer.
        argv: the command.
        stopped: whether the user has stopped the run, which then did not fail.
    """

    def __init__(self, provider: TracerProvider, argv: Sequence[str], stopped: Callable[[], bool]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from oomguard.report.mask import mask_command

        self._tracer = provider.get_tracer(table()["scope"], __version__)
        self._propagator, self._stopped = TraceContextTextMapPropagator(), stopped
        given = {name: os.environ[name.upper()] for name in _CARRIED if name.upper() in os.environ}
        above = self._propagator.extract(given)
        words = {"process.command_args": list(mask_command(tuple(argv)))}
        self._run = self._tracer.start_span(RUN, above, attributes=words)
        self._attempt: Span | None = None
        self._attempts = self._began_ns = 0

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Begin an attempt's span, which the command finds in its environment."""
        from opentelemetry.trace import set_span_in_context

        del patches
        self._attempts = number
        numbered, self._began_ns = {"oomguard.attempt.number": number}, time.time_ns()
        below = set_span_in_context(self._run)
        self._attempt = self._tracer.start_span(ATTEMPT, below, attributes=numbered, start_time=self._began_ns)
        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(self._attempt))
        for name in _CARRIED:
            os.environ.pop(name.upper(), None)
        os.environ.update({name.upper(): text for name, text in carried.items()})

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Note the command's process."""
        del number, launch
        if self._attempt is not None and pid is not None:
            self._attempt.set_attribute("process.pid", pid)

    def ended(self, attempt: Attempt) -> None:
        """End an attempt's span, with its incident as an event."""
        span, self._attempt = self._attempt, None
        if span is None:
            return
        ended_ns = self._began_ns + round(attempt.seconds * 1e9)  # it has been explained since
        span.set_attributes(of_attempt(attempt))
        if attempt.incident is not None:
            span.add_event(INCIDENT, of_incident(attempt.incident, attempt.number), ended_ns)
        why = attempt.incident.headline if attempt.incident is not None else attempt.error
        self._set_status(
            span, why, failed=not attempt.succeeded and (attempt.incident is not None or not self._stopped())
        )
        span.end(ended_ns)

    def end(self, status: int | None) -> None:
        """End the run's span; ``status`` is the run's own, None where its command could not be started."""
        if self._attempt is not None:
            self._set_status(self._attempt, "not started", failed=True)
            self._attempt.end()
        self._run.set_attribute("oomguard.attempts", self._attempts)
        if status is not None:
            self._run.set_attribute("process.exit.code", status)
        why = "not started" if status is None else f"exit status {status}"
        self._set_status(self._run, why, failed=status != 0 and not self._stopped())
        self._run.end()

    def _set_status(self, span: Span, why: str, *, failed: bool) -> None:
        from opentelemetry.trace import StatusCode

        from oomguard.report.presentable import drawn

        if failed:
            span.set_status(StatusCode.ERROR, drawn(why))
