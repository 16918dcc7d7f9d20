"""What goes along with a run and counts its attempts, wherever the figures go."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from oomguard.core.errors import UsageError
from oomguard.core.http_port import LOCAL, HttpAddress, parse_address
from oomguard.core.incident import Attempt, Patch
from oomguard.core.log import get_logger
from oomguard.engines.command import Launch
from oomguard.probe import nvml
from oomguard.telemetry.metrics import Exporter, Figure, Tally, registry_of

# What is read when somebody asks and kept nowhere: the command's own memory, and the devices'.


def sampled(pid: int | None) -> dict[str, Figure]:
    """Return the figures of now; None for what nobody tells, which is then not exported.

    NVML is opened and closed each time: a handle that is kept would stand in the way of a device's
    reset.
    """
    devices: dict[tuple[str, ...], nvml.Device] = {
        (str(d.index), d.name or ""): d for d in nvml.devices() or ()
    }
    total = {labels: d.total_bytes for labels, d in devices.items() if d.total_bytes is not None}
    used = {
        labels: d.total_bytes - d.free_bytes
        for labels, d in devices.items()
        if d.total_bytes is not None and d.free_bytes is not None
    }
    return {
        "resident_bytes": None if pid is None else resident_bytes(pid),
        "device_total_bytes": total,
        "device_used_bytes": used,
    }


def resident_bytes(pid: int) -> int | None:
    """Return the host memory that a process and all below it hold; None where it is gone."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended since
                found.append(process.memory_info().rss)
    if found:
        return sum(found)
    return None


# Where a run's metrics go: ``PORT``, ``HOST:PORT`` or a file whose name ends in .prom.

SUFFIX: Final = ".prom"  # node_exporter's textfile collector reads no other


def parse_target(text: str) -> HttpAddress | Path:
    """Return the address or the file that ``--metrics`` names.

    Raises:
        UsageError: it is neither, or the file's folder cannot be written.
    """
    if text.endswith(SUFFIX):
        path = Path(os.path.realpath(text))  # of a link, its target is written anew: the link stays
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"--metrics {text}: the folder cannot be written", hint="name a folder that exists"
            )
        if path.is_dir():
            raise UsageError(
                f"--metrics {text}: it is a folder",
                hint=f"name a file in it: {text}/oomguard{SUFFIX}",
            )
        if path.is_symlink() or (
            path.exists() and not path.is_file()
        ):  # a loop of links; a device, which a file would replace
            raise UsageError(f"--metrics {text}: it is no regular file", hint="name another file")
        return path
    address = parse_address(text, LOCAL)
    if address is None:
        raise UsageError(
            f"--metrics {text}: neither a port, nor an address, nor a file whose name ends in "
            f"{SUFFIX}",
            hint=(
                "--metrics 9400, --metrics 0.0.0.0:9400, --metrics "
                f"/var/lib/node_exporter/oomguard{SUFFIX}"
            ),
        )
    return address


# Metrics as a file for node_exporter's textfile collector, written anew at each event.


class TextFile:
    """Writes the metrics of one run; who reads meanwhile sees the old file or the new one, never
    half of it.

    Args:
        path: ends in .prom.
        exporter: what is written.
    """

    def __init__(self, path: Path, exporter: Exporter) -> None:
        self._path = path
        self._exporter = exporter
        self._failed = False

    def files(self) -> list[Path]:
        """Return the file, and what is there of a new one beside it, by the names that
        prometheus-client gives it.
        """
        partial = f"{glob.escape(self._path.name)}.{os.getpid()}.*"
        return [self._path, *self._path.parent.glob(partial)]

    def update(self) -> None:
        """Write what is new; say once where that cannot be done."""
        try:
            from prometheus_client import write_to_textfile

            write_to_textfile(str(self._path), registry_of(self._exporter))
            self._failed = False
        except Exception as error:  # noqa: BLE001
            # a full disk, or an installation of the library that is broken
            if not self._failed:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                get_logger().warning(
                    "the metrics cannot be written", path=str(self._path), reason=reason
                )
            self._failed = True


class Outlet(Protocol):
    """Where the figures go."""

    def update(self) -> None:
        """Take what is new."""


class RunMetrics:
    """Counts the attempts of one run, as the journal keeps them.

    Args:
        tally: where they are counted.
        stopped: whether the user has stopped the run: an attempt that ends of that did not fail.

    Attributes:
        outlet: where they go; None: nowhere.
        pid: the command of the attempt under way.
    """

    def __init__(self, tally: Tally, stopped: Callable[[], bool]) -> None:
        self._tally = tally
        self._stopped = stopped
        self._patches: tuple[Patch, ...] = ()
        self.outlet: Outlet | None = None
        self.pid: int | None = None

    def begins(self, number: int, patches: tuple[Patch, ...]) -> None:
        """Note what is new in an attempt that is about to start its command."""
        del number
        self._patches = patches

    def began(self, number: int, launch: Launch, pid: int | None) -> None:
        """Count an attempt whose command has started."""
        del launch
        self.pid = pid
        self._tally.began(self._patches, is_relaunch=number > 1)
        self._update()

    def ended(self, attempt: Attempt) -> None:
        """Count how it ended. One that a stop kept from starting is none."""
        if self._tally.began_at is not None:
            self.pid = None
            self._tally.ended(attempt, is_stopped=self._stopped())
            self._update()

    def _update(self) -> None:
        if self.outlet is not None:
            self.outlet.update()
