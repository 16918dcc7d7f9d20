"""The bar of a ``map`` on a terminal: items done of all, on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from oomguard.core.log import pauses

# Libraries that are loaded while a program of the user's runs: its random numbers stay as they
# are.
#
# rich draws from Python's generator as it is loaded, and structlog loads rich: a program that has
# called ``random.seed`` would draw other numbers after it.


@contextlib.contextmanager
def undrawn(library: str) -> Iterator[None]:
    """Put Python's generator back to where it stood, where ``library`` is loaded inside; do no more
    than that inside.

    Other threads draw from it too: it is not touched where the library is loaded already, or draws
    nothing.
    """
    if library in sys.modules:
        yield
        return
    import random  # of the standard library's larger modules

    before = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)


class MapProgress:
    """A bar over ``total`` items (None: unknown), on a terminal only; elsewhere nothing
    is printed.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.shown = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._progress: Any = None
        self._task: Any = None
        self._lock = threading.RLock()

    def __enter__(self) -> MapProgress:
        if self.shown:
            with undrawn("rich.style"):
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
        """Take the bar off the terminal while a line is written there, and draw it again below."""
        live = self._progress.live
        with self._lock:
            if not live.is_started:
                yield
                return
            live.transient = True  # what stops so is erased
            self._progress.stop()
            try:
                yield
            finally:
                live.transient = False
                self._progress.start()

    def show(self, done: int, total: int | None, *, failed: int = 0, batch: int = 0) -> None:
        """Show how far it is."""
        if self._progress is not None:
            words = [f"{batch} at a time"] * bool(batch) + [f"{failed} failed"] * bool(failed)
            self._progress.update(self._task, completed=done, total=total, batch=", ".join(words))
