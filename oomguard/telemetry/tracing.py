"""A tracer for ``oomguard run``, where the environment asks for one: the command line configures nothing by code.

OpenTelemetry's own variables decide. Without them nothing of it is imported, and with OTEL_SDK_DISABLED=true neither.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from oomguard.installation import install_hint
from oomguard.log import get_logger
from oomguard.telemetry.attributes import table

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OF_SDK: Final = "console"
_GROUP: Final = "opentelemetry_traces_exporter"
# A run ends no later than this for a collector that does not answer.
DELIVER_S: Final = 3.0


def is_asked(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for spans: an exporter that is not ``none``, or where one is to send them."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    named = env.get(_EXPORTER, "").strip().lower()
    return named != "none" if named else any(env.get(name, "").strip() for name in _ENDPOINTS)


class Tracing:
    """OpenTelemetry's SDK as its variables configure it: sampler, resource, exporters.

    Attributes:
        provider: gives the tracer.
    """

    def __init__(self, provider: TracerProvider, troubles: _Troubles) -> None:
        self.provider, self._troubles = provider, troubles

    @classmethod
    def begin(cls) -> Tracing | None:
        """Return it; None, with a line that says why, where it is not installed or its variables cannot be followed."""
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            # Who only names a collector speaks to all programs on the machine; who names an exporter expects spans.
            tell = get_logger().warning if os.environ.get(_EXPORTER, "").strip() else get_logger().debug
            tell("no spans are sent: OpenTelemetry's SDK is not installed", install=_install(_OF_SDK, *_names()))
            return None
        troubles = _Troubles()
        troubles.listen()
        try:
            exporters = [_exporter(name) for name in _names()]
            provider = TracerProvider(shutdown_on_exit=False)
            for exporter in exporters:
                provider.add_span_processor(BatchSpanProcessor(exporter))
        except Exception as error:  # noqa: BLE001 - of whichever exporter is installed: the run goes on without
            get_logger().warning("no spans are sent", reason=f"{type(error).__name__}: {error}")
            return None
        return cls(provider, troubles)

    def deliver(self) -> None:
        """Send what is left, and say where it did not arrive in time."""
        sending = threading.Thread(target=self.provider.shutdown, name="oomguard-spans", daemon=True)
        began_s = time.monotonic()
        sending.start()
        sending.join(DELIVER_S)
        if sending.is_alive() or self._troubles.are_lost:
            why, waited_s = self._troubles.last or "no answer", round(time.monotonic() - began_s, 1)
            get_logger().warning("spans are lost: the collector did not take them", waited_s=waited_s, reason=why)


class _Troubles(logging.Handler):
    """Keeps what the SDK logs: standard error is the command's, and one line at the end says what was lost."""

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
        self.are_lost = self.are_lost or record.levelno >= logging.ERROR  # a warning is of what is tried again


def _names() -> list[str]:
    return [name.strip() for name in os.environ.get(_EXPORTER, "").split(",") if name.strip()] or ["otlp"]


def _exporter(name: str) -> SpanExporter:
    """Return the exporter of that name; raises LookupError where it is not installed."""
    if name == "console":  # standard output is the command's
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr)
    from importlib.metadata import entry_points

    wanted = _of_otlp() if name == "otlp" else (name,)
    found = {entry.name: entry for entry in entry_points(group=_GROUP)}
    entry = next((found[one] for one in wanted if one in found), None)
    if entry is None:
        raise LookupError(f"no exporter {' or '.join(wanted)} is installed: {_install(*wanted[-1:])}")
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
            commands.append(f"a package whose {_GROUP} has {name}")
    return " and ".join(dict.fromkeys(commands))


def _of_otlp() -> tuple[str, ...]:
    by_protocol: dict[str, str] = table()["otlp"]
    asked = next((text for name in _PROTOCOLS if (text := os.environ.get(name, "").strip())), None)
    if asked is None:
        return tuple(by_protocol.values())
    if asked not in by_protocol:
        raise LookupError(f"OTEL_EXPORTER_OTLP_PROTOCOL={asked}: one of {', '.join(by_protocol)}")
    return (by_protocol[asked],)
