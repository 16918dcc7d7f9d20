"""``run --snapshot``: engines are asked for one in their environment; where a command fails and none came, one line says so."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from oomguard.errors import UsageError

if TYPE_CHECKING:
    from oomguard.supervise.outcome import Outcome


class AskedSnapshot:
    """A snapshot that all engines take which the command starts: they find where to in their environment, wherever they run.

    Raises:
        UsageError: its folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        from oomguard.engines.vllm.plugin import SNAPSHOT

        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"--snapshot {path}: the folder cannot be written", hint="name a folder that exists")
        self._path = path.absolute()
        os.environ[SNAPSHOT] = str(self._path)
        self._before = self._files()

    def tell(self, outcome: Outcome) -> None:
        """Say why there is none, where the command failed; whether it did of memory is not always known."""
        is_oom = outcome.diagnosis is not None and outcome.diagnosis.verdict == "oom"
        if (outcome.status or is_oom) and not self._files() - self._before:
            from oomguard.log import get_logger

            get_logger().warning(
                "no memory snapshot was taken",
                why="no allocation failed in a vLLM engine with oomguard's plugin",
                other_programs=f"oomguard.guard(snapshot={str(self._path)!r})",
            )

    def files(self) -> list[Path]:
        """Return the files that a snapshot may have become: each engine writes one of its own."""
        folder, stem, suffix = self._path.parent, self._path.stem, self._path.suffix
        with contextlib.suppress(OSError):
            return [file for file in folder.iterdir() if file.name.startswith(stem) and file.suffix == suffix]
        return []

    def _files(self) -> set[tuple[str, int]]:
        """Return their names, with the time of their last change."""
        found = set()
        for file in self.files():
            with contextlib.suppress(OSError):  # it is gone since
                found.add((file.name, file.stat().st_mtime_ns))
        return found
