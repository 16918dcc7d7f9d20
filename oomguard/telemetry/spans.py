"""Make OpenTelemetry spans of attempts and incidents; spans.toml defines their names."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt, Incident, Patch
from oomguard.core.installation import __version__, install_hint
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


Attributes = dict[str, FactValue]
RUN: Final = "oomguard.run"
ATTEMPT: Final = "oomguard.attempt"
CALL: Final = "oomguard.call"
INCIDENT: Final = "oomguard.incident"
_FILE: Final = Path(__file__).with_name("spans.toml")


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the names of spans, events and attributes, and the exporters."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def of_incident(incident: Incident, number: int) -> Attributes:
    """Return the attributes of an incident's event.

    They are numbers; the only text from the user is the masked headline.
    """
    from oomguard.core.presentable import drawn

    found: Attributes = {
        "oomguard.attempt.number": number,
        "oomguard.incident.kind": incident.kind,
        "oomguard.incident.is_oom": incident.is_oom,
        "oomguard.incident.headline": drawn(incident.headline),
        "oomguard.incident.phase": incident.phase,
        "oomguard.incident.framework": incident.framework,
    }
    for cause in incident.causes[:1]:
        found["oomguard.incident.cause"] = cause.id
        found["oomguard.incident.rule"] = cause.rule
        found["oomguard.incident.confidence"] = cause.confidence
    for name, fact in sorted(incident.facts.items()):
        if not isinstance(fact.value, str):
            found[f"oomguard.fact.{name}"] = fact.value
    return found


def of_attempt(attempt: Attempt) -> Attributes:
    """Return the attributes of an attempt's span."""
    found: Attributes = {"oomguard.attempt.number": attempt.number, **of_settings(attempt)}
    if attempt.exit_status is not None:
        found["process.exit.code"] = attempt.exit_status
    for patch in attempt.patches:
        found |= {f"oomguard.predicted.{name}": value for name, value in patch.predicts.items()}
    return found | {f"oomguard.measured.{name}": value for name, value in attempt.measured.items()}


def of_settings(attempt: Attempt) -> Attributes:
    """Return the settings that oomguard changed in an attempt."""
    return {f"oomguard.setting.{name}": value for name, value in attempt.settings.items()}


# A run is one span, each attempt is a span below it, and each incident is an event.

# The variable that passes a trace to a child process
# (https://opentelemetry.io/docs/specs/otel/context/env-carriers/).
_CARRIED: Final = ("traceparent", "tracestate")


class RunSpans:
    """Make the spans of one run; implements a companion.

    Args:
        provider: the provider of the tracer.
        argv: the command.
        stopped: returns whether the user stopped the run, which then did not fail.
    """

    def __init__(
        self, provider: TracerProvider, argv: Sequence[str], stopped: Callable[[], bool]
    ) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from oomguard.core.redact import mask_command

        self._tracer = provider.get_tracer(table()["scope"], __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._stopped = stopped
        given = {}
        for name in _CARRIED:
            if name.upper() in os.environ:
                given[name] = os.environ[name.upper()]
        above = self._propagator.extract(given)
        words = {"process.command_args": list(mask_command(tuple(argv)))}
        self._run = self._tracer.start_span(RUN, above, attributes=words)
        self._attempt: Span | None = None
        self._attempts = self._began_ns = 0

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Begin an attempt's span, and pass it to the command in its environment."""
        from opentelemetry.trace import set_span_in_context

        del patches
        self._attempts = number
        numbered = {"oomguard.attempt.number": number}
        self._began_ns = time.time_ns()
        below = set_span_in_context(self._run)
        self._attempt = self._tracer.start_span(
            ATTEMPT, below, attributes=numbered, start_time=self._began_ns
        )
        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(self._attempt))
        for name in _CARRIED:
            os.environ.pop(name.upper(), None)
        os.environ.update({name.upper(): text for name, text in carried.items()})

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Record the command's process."""
        del number, launch
        if self._attempt is not None and pid is not None:
            self._attempt.set_attribute("process.pid", pid)

    def ended(self, attempt: Attempt) -> None:
        """End an attempt's span, with its incident as an event."""
        span = self._attempt
        self._attempt = None
        if span is None:
            return
        # the attempt was diagnosed in the meantime
        ended_ns = self._began_ns + round(attempt.seconds * 1e9)
        span.set_attributes(of_attempt(attempt))
        if attempt.incident is not None:
            span.add_event(INCIDENT, of_incident(attempt.incident, attempt.number), ended_ns)
        if attempt.incident is not None:
            why = attempt.incident.headline
        else:
            why = attempt.error
        self._set_status(
            span,
            why,
            failed=not attempt.succeeded and (attempt.incident is not None or not self._stopped()),
        )
        span.end(ended_ns)

    def end(self, status: int | None) -> None:
        """End the run's span.

        ``status`` is the exit status of the run, or None if the command could not be started.
        """
        if self._attempt is not None:
            self._set_status(self._attempt, "not started", failed=True)
            self._attempt.end()
        self._run.set_attribute("oomguard.attempts", self._attempts)
        if status is not None:
            self._run.set_attribute("process.exit.code", status)
        if status is None:
            why = "not started"
        else:
            why = f"exit status {status}"
        self._set_status(self._run, why, failed=status != 0 and not self._stopped())
        self._run.end()

    def _set_status(self, span: Span, why: str, *, failed: bool) -> None:
        from opentelemetry.trace import StatusCode

        from oomguard.core.presentable import drawn

        if failed:
            span.set_status(StatusCode.ERROR, drawn(why))


# OpenTelemetry's own variables decide whether and how to trace. Without them, or with
# OTEL_SDK_DISABLED=true, nothing is imported.

_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OF_SDK: Final = "console"
_GROUP: Final = "opentelemetry_traces_exporter"
# A collector that does not answer delays the end of a run by at most this time.
DELIVER_S: Final = 3.0


def is_enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variables name an exporter other than ``none``, or an endpoint."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    named = env.get(_EXPORTER, "").strip().lower()
    if named:
        return named != "none"
    return any(env.get(name, "").strip() for name in _ENDPOINTS)


class Tracing:
    """Hold OpenTelemetry's SDK as its variables configure it: sampler, resource, exporters.

    Attributes:
        provider: the provider of the tracer.
    """

    def __init__(self, provider: TracerProvider, troubles: _SdkLogCollector) -> None:
        self.provider = provider
        self._troubles = troubles

    @classmethod
    def begin(cls) -> Tracing | None:
        """Return the tracing, or None with a warning if the SDK is missing or misconfigured."""
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            # A variable with only an endpoint may be meant for other programs, but one with an
            # exporter asks for spans here.
            if os.environ.get(_EXPORTER, "").strip():
                log_event = get_logger().warning
            else:
                log_event = get_logger().debug
            log_event(
                "no spans are sent: OpenTelemetry's SDK is not installed",
                install=_install(_OF_SDK, *_names()),
            )
            return None
        troubles = _SdkLogCollector()
        troubles.listen()
        try:
            exporters = [_exporter(name) for name in _names()]
            provider = TracerProvider(shutdown_on_exit=False)
            for exporter in exporters:
                provider.add_span_processor(BatchSpanProcessor(exporter))
        except Exception as error:  # noqa: BLE001
            # any exporter's error; the run continues without spans
            get_logger().warning("no spans are sent", reason=f"{type(error).__name__}: {error}")
            return None
        return cls(provider, troubles)

    def deliver(self) -> None:
        """Send the remaining spans, and log a warning if they did not arrive in time."""
        sending = threading.Thread(
            target=self.provider.shutdown, name="oomguard-spans", daemon=True
        )
        began_s = time.monotonic()
        sending.start()
        sending.join(DELIVER_S)
        if sending.is_alive() or self._troubles.are_lost:
            why = self._troubles.last or "no answer"
            waited_s = round(time.monotonic() - began_s, 1)
            get_logger().warning(
                "spans are lost because the collector did not accept them",
                waited_s=waited_s,
                reason=why,
            )


class _SdkLogCollector(logging.Handler):
    """Collect the SDK's log messages; one line at the end shows what was lost.

    The SDK must not write to standard error, which belongs to the command.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last: str | None = None
        self.are_lost = False

    def listen(self) -> None:
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage().partition("\n")[0]
        # The SDK tries again after a warning.
        self.are_lost = self.are_lost or record.levelno >= logging.ERROR


def _names() -> list[str]:
    names = map(str.strip, os.environ.get(_EXPORTER, "").split(","))
    return list(filter(None, names)) or ["otlp"]


def _exporter(name: str) -> SpanExporter:
    """Return the exporter of a name.

    Raises:
        LookupError: it is not installed.
    """
    # Standard output belongs to the command.
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    from importlib.metadata import entry_points

    if name == "otlp":
        wanted = _of_otlp()
    else:
        wanted = (name,)
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    entry = None
    for one in wanted:
        if one in found:
            entry = found[one]
            break
    if entry is None:
        raise LookupError(
            f"no exporter {' or '.join(wanted)} is installed: {_install(*wanted[-1:])}"
        )
    make: Callable[[], Any] = entry.load()
    exporter: SpanExporter = make()
    return exporter


def _install(*names: str) -> str:
    """Return how to install these exporters."""
    packages = table()["packages"]
    commands = []
    for name in names:
        if name in packages["in_extra"]:
            commands.append(install_hint("otel"))
        elif name in packages:
            commands.append(f"pip install {packages[name]}")
        else:
            commands.append(f"a package that provides {name} for {_GROUP}")
    return " and ".join(dict.fromkeys(commands))


def _of_otlp() -> tuple[str, ...]:
    by_protocol: dict[str, str] = table()["otlp"]
    asked = next(filter(None, (os.environ.get(name, "").strip() for name in _PROTOCOLS)), None)
    if asked is None:
        return tuple(by_protocol.values())
    if asked not in by_protocol:
        raise LookupError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={asked} must be one of {', '.join(by_protocol)}"
        )
    return (by_protocol[asked],)
