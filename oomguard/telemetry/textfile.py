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
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(str(self._path), registry_of(self._exporter))
            self._failed = False
        except OSError as error:
            if not self._failed:
                get_logger().warning(
                    "the metrics cannot be written", path=str(self._path), reason=error.strerror or str(error)
                )
            self._failed = True
