"""Add ``run --metrics``, and run a command with metrics and OpenTelemetry spans."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oomguard.analyst.attempt_hooks import AttemptHook
from oomguard.analyst.attempt_loop import AttemptLoop
from oomguard.analyst.host_trend import HostTrend
from oomguard.analyst.nested_run import unwrap_command
from oomguard.cli.options import RECORDS, option
from oomguard.core.errors import UsageError
from oomguard.core.log import get_logger

if TYPE_CHECKING:
    from oomguard.analyst.link import Link
    from oomguard.analyst.outcome import Outcome
    from oomguard.core.http_port import HttpAddress
    from oomguard.telemetry.metrics import Exporter, Figure
    from oomguard.telemetry.run_metrics import Outlet
    from oomguard.telemetry.spans import Tracing

F = TypeVar("F", bound=Callable[..., Any])


def metrics_option(function: F) -> F:
    """Add the option --metrics."""
    return option(
        "--metrics",
        metavar="[HOST:]PORT|FILE",
        help=(
            "Serve Prometheus metrics of this run on a local port (0 picks a free one), or write "
            "them to FILE, whose name ends in .prom."
        ),
        group=RECORDS,
        example="9100",
    )(function)


def run_with_metrics(
    supervision: AttemptLoop, link: Link, ctx: click.Context, metrics: str | None, *, is_inner: bool
) -> Outcome:
    """Run the command, and count and trace its attempts as far as the user asked.

    Args:
        supervision: the run.
        link: the connection to the supervisor, which knows whether the user stopped the run.
        ctx: the command line, which shows whether a flag or a variable asks for metrics.
        metrics: the target of the metrics. None: no metrics.
        is_inner: whether another run is around this one, which uses the same variables.

    Raises:
        UsageError: ``metrics`` is invalid, or prometheus-client is not installed.
        LaunchError: the command cannot be started.
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
            # the command has ended, and lost spans must not change its status
            get_logger().warning("spans are lost", reason=f"{type(error).__name__}: {error}")
    return outcome


def _tracing() -> Tracing | None:
    """Return the tracing, or None without OpenTelemetry variables; then nothing is loaded."""
    if not any(name.startswith("OTEL_") for name in os.environ):
        return None
    from oomguard.telemetry import spans

    if spans.is_enabled():
        return spans.Tracing.begin()
    return None


def _is_inherited(ctx: click.Context) -> bool:
    """Return whether a variable or a file asks for metrics, which the outer run already serves."""
    return ctx.get_parameter_source("metrics") is not click.core.ParameterSource.COMMANDLINE


def _counting(text: str, supervision: AttemptLoop, stopped: Callable[[], bool]) -> AttemptHook:
    """Return the counter of a run's attempts; a file that it writes counts as oomguard's own."""
    from oomguard.telemetry.metrics import Exporter, Tally, require_library
    from oomguard.telemetry.run_metrics import RunMetrics, TextFile, parse_target, read_sample

    target = parse_target(text)
    tally = Tally()
    require_library()
    counting = RunMetrics(tally, stopped)
    if isinstance(target, Path):
        counting.outlet = file = TextFile(target, Exporter(tally, {"run"}))
        supervision.own_files.add(file.files)
    else:
        _leave_the_commands_port(target, supervision.launch.argv)

        def sample() -> dict[str, Figure]:
            figures = read_sample(counting.pid, _full_in_s(supervision))
            if counting.pid is not None:
                figures |= tally.with_survived(supervision.survived_steps())
            return figures

        counting.outlet = _serving(target, Exporter(tally, {"run", "scrape"}, sample))
    return counting


def _full_in_s(supervision: AttemptLoop) -> float | None:
    """Return the seconds until the host's memory is full; None without a trend."""
    for hook in supervision.companions.of_run:
        if isinstance(hook, HostTrend) and hook.forecast is not None:
            return hook.forecast.full_in_s
    return None


def _leave_the_commands_port(address: HttpAddress, argv: tuple[str, ...]) -> None:
    """Raise UsageError for the port that the command's own server needs."""
    from oomguard.engines.command import Launch
    from oomguard.engines.registry import launcher_of
    from oomguard.engines.server import address_of

    own = (address_of(words, launcher_of(Launch(words)).NAME) for words in unwrap_command(argv))
    if address.port and address.port in {one.port for one in own if one is not None}:
        raise UsageError(
            f"--metrics {address}: the command itself listens on port {address.port}",
            hint="--metrics 0 picks a free port",
        )


def _serving(address: HttpAddress, exporter: Exporter) -> Outlet | None:
    """Return the metrics server, or None with a warning if it cannot listen."""
    from oomguard.telemetry.run_metrics import Endpoint

    log = get_logger()
    try:
        endpoint = Endpoint(address, exporter)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = {"held_by": f"ss -ltnp 'sport = :{address.port}'"}
        else:
            taken = {}
        # Use the system's error text, without the address that Python adds. The number of a failed
        # name lookup is below 0.
        if error.errno in errno.errorcode:
            number = error.errno
        else:
            number = None
        if number is not None:
            why = os.strerror(number)
        else:
            why = error.strerror or str(error)
        log.warning(
            "no metrics are served; the run continues without them",
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
