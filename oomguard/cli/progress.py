"""The bar on a terminal while inputs are read: by bytes, on standard error, gone when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

BIG_BYTES: Final = 64 << 20
# Taking the bar off the screen and drawing it again costs a millisecond: not for each of thousands of lines.
PRINT_S: Final = 0.1


class ReadingProgress:
    """A bar over ``total_bytes`` of ``files`` inputs, shown on a terminal when reading takes a while.

    ``write`` prints a text; where the bar is on the same screen, it makes way.
    """

    def __init__(self, files: int, total_bytes: int, write: Callable[[str], None]) -> None:
        self.shown = sys.stderr is not None and sys.stderr.isatty() and (files > 1 or total_bytes > BIG_BYTES)
        self._files, self._done, self._write = files, 0, write
        self._same_screen = self.shown and sys.stdout is not None and sys.stdout.isatty()
        self._kept: list[str] = []
        self._printed_s = time.monotonic()
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task(self._words(), total=total_bytes or None)

    def __enter__(self) -> ReadingProgress:
        if self.shown:
            self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.shown:
            self._progress.stop()
            if kind is None:
                self._write("".join(self._kept))

    def read(self, size_bytes: int) -> None:
        """Note that so many more bytes have been read."""
        if self.shown:
            self._progress.advance(self._task, size_bytes)
            self._print_kept()

    def finish(self, text: str) -> None:
        """Note that one more input is done, and print its text."""
        self._done += 1
        if self.shown:
            self._progress.update(self._task, description=self._words())
        if self._same_screen:
            self._kept.append(text)
            self._print_kept()
        else:
            self._write(text)

    def _print_kept(self) -> None:
        """Take the bar off the screen while something else is printed there."""
        if not any(self._kept) or time.monotonic() - self._printed_s < PRINT_S:
            return
        self._progress.stop()
        self._write("".join(self._kept))
        self._kept.clear()
        self._progress.start()
        self._printed_s = time.monotonic()

    def _words(self) -> str:
        return f"{self._done} of {self._files} inputs" if self._files > 1 else "reading"
