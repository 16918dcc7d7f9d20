"""Add ``run --metrics``: count the attempts of a run, and write or serve the figures."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click

from oomguard.analyst.attempt_hooks import AttemptHook
from oomguard.analyst.attempt_loop import AttemptLoop
from oomguard.analyst.host_trend import HostTrend
from oomguard.analyst.nested_run import unwrap_command
from oomguard.cli.options import RECORDS, option
from oomguard.core.errors import UsageError
from oomguard.core.http_port import (
    EVERYWHERE,
    LOCAL,
    HttpAddress,
    HttpPort,
    listening_at,
    parse_address,
)
from oomguard.core.incident import Attempt, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.probe import nvml
from oomguard.telemetry.metrics import Exporter, Figure, Tally, registry_of

if TYPE_CHECKING:
    from oomguard.analyst.link import Link
    from oomguard.analyst.outcome import Outcome
    from oomguard.telemetry.spans import Tracing


# The memory of the command and of the devices is read on request and not stored.


def read_sample(pid: int | None, host_full_in_s: float | None = None) -> dict[str, Figure]:
    """Return the current figures; an unknown one is None and is not exported.

    NVML is opened and closed each time, because an open handle would block a reset of the device.
    """
    devices: dict[tuple[str, ...], nvml.Device] = {}
    for d in nvml.devices() or ():
        devices[(str(d.index), d.name or "")] = d
    total = {}
    used = {}
    for labels, device in devices.items():
        if device.total_bytes is None:
            continue
        total[labels] = device.total_bytes
        if device.free_bytes is not None:
            used[labels] = device.total_bytes - device.free_bytes
    return {
        "host_full_in_s": host_full_in_s,
        "resident_bytes": None if pid is None else resident_bytes(pid),
        "device_total_bytes": total,
        "device_used_bytes": used,
    }


def resident_bytes(pid: int) -> int | None:
    """Return the host memory of a process and its descendants, or None if it has ended."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            # The process has ended.
            with contextlib.suppress(psutil.Error):
                found.append(process.memory_info().rss)
    if found:
        return sum(found)
    return None


# The target of a run's metrics is ``PORT``, ``HOST:PORT`` or a file whose name ends in .prom.

# node_exporter's textfile collector reads only this suffix.
SUFFIX: Final = ".prom"


def parse_target(text: str) -> HttpAddress | Path:
    """Return the address or the file of ``--metrics``.

    Raises:
        UsageError: the value is invalid, or the file's folder is not writable.
    """
    if text.endswith(SUFFIX):
        # follow a link and replace its target, so that it stays a link
        path = Path(os.path.realpath(text))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"--metrics {text}: the folder cannot be written", hint="name a folder that exists"
            )
        if path.is_dir():
            raise UsageError(
                f"--metrics {text} is a folder",
                hint=f"name a file in it: {text}/oomguard{SUFFIX}",
            )
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # A loop of links, or a device, which a file would replace.
            raise UsageError(f"--metrics {text} is not a regular file", hint="name another file")
        return path
    address = parse_address(text, LOCAL)
    if address is None:
        raise UsageError(
            f"--metrics {text} is not a port, an address, or a file whose name ends in {SUFFIX}",
            hint=(
                "--metrics 9400, --metrics 0.0.0.0:9400, --metrics "
                f"/var/lib/node_exporter/oomguard{SUFFIX}"
            ),
        )
    return address


# Metrics as a file for node_exporter's textfile collector, rewritten at each event.


class TextFile:
    """Write the metrics of one run to a file; a reader sees either the old or the new file.

    Args:
        path: the file, whose name ends in .prom.
        exporter: the metrics.
    """

    def __init__(self, path: Path, exporter: Exporter) -> None:
        self._path = path
        self._exporter = exporter
        self._failed = False

    def files(self) -> list[Path]:
        """Return the file, and unfinished versions under prometheus-client's names."""
        partial = f"{glob.escape(self._path.name)}.{os.getpid()}.*"
        return [self._path, *self._path.parent.glob(partial)]

    def update(self) -> None:
        """Write the current metrics; log only the first of several errors."""
        try:
            from prometheus_client import write_to_textfile

            write_to_textfile(str(self._path), registry_of(self._exporter))
            self._failed = False
        except Exception as error:  # noqa: BLE001
            # a full disk, or a broken installation of prometheus-client
            if not self._failed:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                get_logger().warning(
                    "could not write the metrics", path=str(self._path), reason=reason
                )
            self._failed = True


class Outlet(Protocol):
    """Define a target of the figures."""

    def update(self) -> None:
        """Publish the current figures."""


class RunMetrics:
    """Count the attempts of one run, like the journal; implements a companion.

    Args:
        tally: the counts.
        stopped: returns whether the user stopped the run. An attempt that ends because of that did
            not fail.

    Attributes:
        outlet: the target of the figures. None: no target.
        pid: the command of the current attempt, or None.
    """

    def __init__(self, tally: Tally, stopped: Callable[[], bool]) -> None:
        self._tally = tally
        self._stopped = stopped
        self._patches: tuple[Patch, ...] = ()
        self.outlet: Outlet | None = None
        self.pid: int | None = None

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Record the new patches of an attempt before its command starts."""
        del number
        self._patches = patches

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Count an attempt whose command has started."""
        del launch
        self.pid = pid
        self._tally.began(self._patches, is_relaunch=number > 1)
        self._update()

    def ended(self, attempt: Attempt) -> None:
        """Count the end of an attempt, unless a stop prevented its start."""
        if self._tally.began_at is not None:
            self.pid = None
            self._tally.ended(attempt, is_stopped=self._stopped())
            self._update()

    def _update(self) -> None:
        if self.outlet is not None:
            self.outlet.update()


# Serve the metrics of a run over HTTP.


# The port is taken before the command starts. prometheus-client is loaded while it runs.

# A client cannot connect to these listening addresses, but to their replacements.
_OPENED: Final = {"0.0.0.0": "127.0.0.1", EVERYWHERE: "::1"}  # noqa: S104


class Endpoint:
    """Serve the metrics of one run until the process ends.

    Args:
        address: the address to listen at.
        exporter: the metrics.

    Attributes:
        address: the address with the real port.

    Raises:
        OSError: the address is not available.
    """

    def __init__(self, address: HttpAddress, exporter: Exporter) -> None:
        self._socket: socket.socket | None = listening_at(address)
        self.address = HttpAddress(address.host, self._socket.getsockname()[1])
        self._exporter = exporter

    def update(self) -> None:
        """Start to answer requests; earlier ones wait in the socket's queue.

        Later calls do nothing, because each scrape reads the current figures.
        """
        if self._socket is not None:
            listening = self._socket
            self._socket = None
            threading.Thread(
                target=self._serve, args=(listening,), name="oomguard-metrics", daemon=True
            ).start()

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        opened = HttpAddress(_OPENED.get(self.address.host, self.address.host), self.address.port)
        return f"http://{opened}/metrics"

    def _serve(self, listening: socket.socket) -> None:
        try:
            _server(listening, self._exporter).serve_forever()
        except Exception as error:  # noqa: BLE001
            # a broken installation of prometheus-client may raise anything
            listening.close()
            get_logger().warning(
                "no metrics are served; the run continues without them",
                reason=f"{type(error).__name__}: {error}",
            )


def _server(listening: socket.socket, exporter: Exporter) -> HttpPort:
    from prometheus_client import MetricsHandler

    class Handler(MetricsHandler):
        registry = registry_of(exporter)

        def do_HEAD(self) -> None:  # noqa: N802 - the name that http.server calls
            """Answer like GET, without the body."""
            answering = self.wfile
            self.wfile = io.BytesIO()
            self.do_GET()
            answer = self.wfile.getvalue()
            self.wfile = answering
            head, end, _ = answer.partition(b"\r\n\r\n")
            self.wfile.write(head + end)

    return HttpPort(listening, Handler)


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
    from oomguard.telemetry.metrics import require_library

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

    if not address.port:
        return
    for words in unwrap_command(argv):
        own = address_of(words, launcher_of(Launch(words)).NAME)
        if own is not None and own.port == address.port:
            raise UsageError(
                f"--metrics {address}: the command itself listens on port {address.port}",
                hint="--metrics 0 picks a free port",
            )


def _serving(address: HttpAddress, exporter: Exporter) -> Outlet | None:
    """Return the metrics server, or None with a warning if it cannot listen."""

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
