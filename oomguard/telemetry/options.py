"""``run --metrics``, and the spans that OpenTelemetry's variables ask for: what goes along with the
run, and ends with it.
"""

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
    from oomguard.analyst.attempt_hooks import Companion
    from oomguard.analyst.link import Link
    from oomguard.analyst.loop import Supervision
    from oomguard.analyst.outcome import Outcome
    from oomguard.core.http_port import HttpAddress
    from oomguard.telemetry.metrics import Exporter
    from oomguard.telemetry.run_metrics import Outlet
    from oomguard.telemetry.spans import Tracing

F = TypeVar("F", bound=Callable[..., Any])


def metrics_option(function: F) -> F:
    """Add --metrics."""
    return option(
        "--metrics",
        metavar="[HOST:]PORT|FILE",
        help=(
            "Serve Prometheus metrics of this run on a port of this machine, 0 for any, or keep "
            "them in FILE, whose name ends in .prom."
        ),
    )(function)


def run_with_metrics(
    supervision: Supervision, link: Link, ctx: click.Context, metrics: str | None, *, is_inner: bool
) -> Outcome:
    """Run the command, with what counts and tells its attempts beside what goes along already.

    Args:
        supervision: the run.
        link: to the supervisor, which tells whether the user has stopped it.
        ctx: tells whether a flag or a variable asks for metrics.
        metrics: where they go; None: nowhere.
        is_inner: whether another run is around this one, which heeds the same variables.

    Raises:
        UsageError: ``metrics`` is no place for metrics, or prometheus-client is not installed.
        LaunchError: the command cannot be started at all.
    """

    def stopped() -> bool:
        return link.signals.stopped_by is not None

    from oomguard.analyst.attempt_hooks import Companions

    argv = supervision.launch.argv
    along = list(supervision.companions.of_run)
    if metrics is not None and not (is_inner and _is_inherited(ctx)):
        along.append(_counting(metrics, supervision, stopped))
    tracing = _tracing()
    if tracing is None:
        supervision.companions = Companions(tuple(along))
        return supervision.run(link)
    from oomguard.telemetry.spans import RunSpans

    spans = RunSpans(tracing.provider, argv, stopped)
    supervision.companions = Companions((*along, spans))
    status = None
    try:
        outcome = supervision.run(link)
        status = outcome.status
    finally:
        try:
            spans.end(status)
            tracing.deliver()
        except Exception as error:  # noqa: BLE001
            # the command has ended, and its status is told whatever becomes of the spans
            get_logger().warning("spans are lost", reason=f"{type(error).__name__}: {error}")
    return outcome


def _tracing() -> Tracing | None:
    """Return what sends spans; None where the environment does not ask for it, which
    loads nothing.
    """
    if not any(name.startswith("OTEL_") for name in os.environ):
        return None
    from oomguard.telemetry import spans

    if spans.is_asked():
        return spans.Tracing.begin()
    return None


def _is_inherited(ctx: click.Context) -> bool:
    """Return whether no flag of this run asks for metrics: a variable or a file speaks to the run
    around it too.
    """
    return ctx.get_parameter_source("metrics") is not click.core.ParameterSource.COMMANDLINE


def _counting(text: str, supervision: Supervision, stopped: Callable[[], bool]) -> Companion:
    """Return what counts a run's attempts; the file that it writes is one of the run's own."""
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


def _leave_the_commands_port(address: HttpAddress, argv: tuple[str, ...]) -> None:
    """Raise UsageError for the port that the command's own server will need."""
    from oomguard.analyst.nested_run import unwrapped
    from oomguard.engines.command import Launch
    from oomguard.engines.registry import launcher_of
    from oomguard.engines.server import address_of

    own = (address_of(words, launcher_of(Launch(words)).NAME) for words in unwrapped(argv))
    if address.port and address.port in {one.port for one in own if one is not None}:
        raise UsageError(
            f"--metrics {address}: the command itself listens on port {address.port}",
            hint="--metrics 0 takes any that is free",
        )


def _serving(address: HttpAddress, exporter: Exporter) -> Outlet | None:
    """Return what serves the metrics; None, with a warning, where it cannot listen there: the
    command runs all the same.
    """
    from oomguard.telemetry.http_server import Endpoint

    log = get_logger()
    try:
        endpoint = Endpoint(address, exporter)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = {"held_by": f"ss -ltnp 'sport = :{address.port}'"}
        else:
            taken = {}
        # The system's words, without the address that Python adds to them; a name that is not found
        # has a number below 0.
        if error.errno in errno.errorcode:
            number = error.errno
        else:
            number = None
        if number is not None:
            why = os.strerror(number)
        else:
            why = error.strerror or str(error)
        log.warning(
            "no metrics are served: the run goes on without",
            address=str(address),
            reason=why,
            **taken,
        )
        return None
    if address.port == 0:
        tell = log.info
    else:
        tell = log.debug
    tell("metrics are served", url=endpoint.url)
    return endpoint
