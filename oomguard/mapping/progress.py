"""Show a progress bar of finished items on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from oomguard.core.log import pauses

# Loading rich draws from Python's random generator, and structlog loads rich. A program that has
# called ``random.seed`` would then get other random numbers.


@contextlib.contextmanager
def keep_random_state(library: str) -> Iterator[None]:
    """Restore Python's random generator after ``library`` is loaded inside the context.

    Other threads use the generator too. So it stays untouched if the library is already loaded, and
    the context should contain only the import.
    """
    if library in sys.modules:
        yield
        return
    import random  # a larger module of the standard library

    before = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)


class MapProgress:
    """Show a progress bar on a terminal, and nothing elsewhere."""

    def __init__(self, *, wanted: bool) -> None:
        self.shown = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._progress: Any = None
        self._task: Any = None
        self._lock = threading.RLock()

    def __enter__(self) -> MapProgress:
        if self.shown:
            with keep_random_state("rich.style"):
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[batch]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("items", total=None, batch="")
            self._progress.start()
            pauses.append(self.paused)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with self._lock:
                with suppress(ValueError):
                    pauses.remove(self.paused)
                self._progress.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the bar while a line is written, then draw it again below."""
        live = self._progress.live
        with self._lock:
            if not live.is_started:
                yield
                return
            live.transient = True  # stopping erases the bar
            self._progress.stop()
            try:
                yield
            finally:
                live.transient = False
                self._progress.start()

    def show(self, done: int, total: int | None, *, failed: int = 0, batch: int = 0) -> None:
        """Update the bar; ``total`` is None if the number of items is unknown."""
        if self._progress is not None:
            words = [f"{batch} at a time"] * bool(batch) + [f"{failed} failed"] * bool(failed)
            self._progress.update(self._task, completed=done, total=total, batch=", ".join(words))
