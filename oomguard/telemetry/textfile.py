"""Metrics as a file for node_exporter's textfile collector, written anew at each event."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from oomguard.log import get_logger
from oomguard.telemetry.exporter import Exporter, registry_of


class TextFile:
    """Writes the metrics of one run; who reads meanwhile sees the old file or the new one, never half of it.

    Args:
        path: ends in .prom.
        exporter: what is written.
    """

    def __init__(self, path: Path, exporter: Exporter) -> None:
        self._path, self._exporter = path, exporter
        self._failed = False

    def files(self) -> list[Path]:
        """Return the file, and what is there of a new one beside it, by the names that prometheus-client gives it."""
        partial = f"{glob.escape(self._path.name)}.{os.getpid()}.*"
        return [self._path, *self._path.parent.glob(partial)]

    def update(self) -> None:
        """Write what is new; say once where that cannot be done."""
        try:
            from prometheus_client import write_to_textfile

            write_to_textfile(str(self._path), registry_of(self._exporter))
            self._failed = False
        except Exception as error:  # noqa: BLE001 - a full disk, or an installation of the library that is broken
            if not self._failed:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
                get_logger().warning("the metrics cannot be written", path=str(self._path), reason=reason)
            self._failed = True
