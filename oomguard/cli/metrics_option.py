"""Add ``run --metrics`` and OpenTelemetry spans to a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oomguard.cli.options import option
from oomguard.core.errors import UsageError
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.analyst.attempt_hooks import AttemptHook
    from oomguard.analyst.link import Link
    from oomguard.analyst.loop import AttemptLoop
    from oomguard.analyst.outcome import Outcome
    from oomguard.telemetry.metrics import Exporter
    from oomguard.telemetry.run_metrics import MetricsAddress, Outlet
    from oomguard.telemetry.spans import Tracing

F = TypeVar("F", bound=Callable[..., Any])


def metrics_option(function: F) -> F:
    """Add the option --metrics."""
    return option(
        "--metrics",
        metavar="[HOST:]PORT|FILE",
        help=(
            "Serve Prometheus metrics on a port (0 = any free port), or write them to FILE, whose "
            "name ends in .prom. [default: no metrics]"
        ),
    )(function)


def run_observed(
    supervision: AttemptLoop, link: Link, ctx: click.Context, metrics: str | None, *, is_inner: bool
) -> Outcome:
    """Run the command with metrics and spans, in addition to its other listeners.

    Args:
        supervision: the run.
        link: the link to the supervisor, which knows whether the user stopped the run.
        ctx: shows whether a flag or a variable gives ``metrics``.
        metrics: where the metrics go; None for no metrics.
        is_inner: whether another run is around this one, which uses the same variables.

    Raises:
        UsageError: if ``metrics`` is not an address or file, or prometheus-client is missing.
        LaunchError: if the command cannot be started.
    """

    def stopped() -> bool:
        return link.signals.stopped_by is not None

    from oomguard.analyst.attempt_hooks import AttemptHooks

    argv = supervision.launch.argv
    along = list(supervision.companions.of_run)
    if metrics is not None and not (is_inner and _is_inherited(ctx)):
        along.append(_counting(metrics, supervision, stopped))
    tracing = _tracing()
    if tracing is None:
        supervision.companions = AttemptHooks(tuple(along))
        return supervision.run(link)
    from oomguard.telemetry.spans import RunSpans

    spans = RunSpans(tracing.provider, argv, stopped)
    supervision.companions = AttemptHooks((*along, spans))
    status = None
    try:
        outcome = supervision.run(link)
        status = outcome.status
    finally:
        try:
            spans.end(status)
            tracing.deliver()
        except Exception as error:  # noqa: BLE001
            # The command has ended, and a failed span must not hide its status.
            get_logger().warning(
                "Trace spans dropped: the collector did not accept them",
                reason=f"{type(error).__name__}: {error}",
            )
    return outcome


def _tracing() -> Tracing | None:
    """Return the sender of spans; None if no OTEL_ variable asks for spans.

    Without such a variable nothing is imported.
    """
    if not any(name.startswith("OTEL_") for name in os.environ):
        return None
    from oomguard.telemetry import spans

    if spans.is_asked():
        return spans.Tracing.begin()
    return None


def _is_inherited(ctx: click.Context) -> bool:
    """Return whether only a variable or a file asks for metrics, not a flag of this run.

    The outer run uses the same variable or file.
    """
    return ctx.get_parameter_source("metrics") is not click.core.ParameterSource.COMMANDLINE


def _counting(text: str, supervision: AttemptLoop, stopped: Callable[[], bool]) -> AttemptHook:
    """Return the listener that counts attempts; a metrics file is one of the run's own files."""
    from oomguard.telemetry.metrics import Exporter, Tally, require_library
    from oomguard.telemetry.run_metrics import RunMetrics, TextFile, parse_target, sampled

    target = parse_target(text)
    tally = Tally()
    require_library()
    counting = RunMetrics(tally, stopped)
    if isinstance(target, Path):
        counting.outlet = file = TextFile(target, Exporter(tally, {"run"}))
        supervision.own_files.add(file.files)
    else:
        _leave_the_commands_port(target, supervision.launch.argv)
        counting.outlet = _serving(
            target, Exporter(tally, {"run", "scrape"}, lambda: sampled(counting.pid))
        )
    return counting


def _leave_the_commands_port(address: MetricsAddress, argv: tuple[str, ...]) -> None:
    """Refuse the port that the command's own server needs.

    Raises:
        UsageError: if the ports are the same.
    """
    from oomguard.analyst.nested_run import unwrap_command
    from oomguard.engines.command import Launch
    from oomguard.engines.registry import launcher_of
    from oomguard.engines.server import address_of

    own = (address_of(words, launcher_of(Launch(words)).NAME) for words in unwrap_command(argv))
    if address.port and address.port in {one.port for one in own if one is not None}:
        raise UsageError(
            f"--metrics {address}: the command itself uses port {address.port}",
            hint="choose another port, or --metrics 0 for any free port",
        )


def _serving(address: MetricsAddress, exporter: Exporter) -> Outlet | None:
    """Return the metrics server; None, with a warning, if it cannot listen on the address."""
    from oomguard.telemetry.http_server import Endpoint

    log = get_logger()
    try:
        endpoint = Endpoint(address, exporter)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = {"held_by": f"ss -ltnp 'sport = :{address.port}'"}
        else:
            taken = {}
        # Use the system's words without the address that Python adds. An unknown host name has a
        # number below 0.
        if error.errno in errno.errorcode:
            number = error.errno
        else:
            number = None
        if number is not None:
            why = os.strerror(number)
        else:
            why = error.strerror or str(error)
        log.warning(
            "Metrics are not served, because oomguard cannot listen on this address",
            address=str(address),
            reason=why,
            **taken,
        )
        return None
    if address.port == 0:
        write = log.info
    else:
        write = log.debug
    write("Serving metrics", url=endpoint.url)
    return endpoint
