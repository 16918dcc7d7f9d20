"""Look for words in what a command prints while it runs, beside the copying: a thread reads the
copy, and waits in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from oomguard.analyst.link import LiveOutput

POLL_S: Final = 0.25


class LiveWords:
    """Calls ``then`` once the words have stood in the output so many times.

    Args:
        recording: what is printed.
        words: what is looked for.
        times: how often it has to stand there.
        then: called once, in the thread.
    """

    def __init__(
        self, recording: LiveOutput, words: bytes, times: int, then: Callable[[], None]
    ) -> None:
        self._recording = recording
        self._words = words
        self._left = times
        self._then = then
        self._stopped = threading.Event()
        self._came = 0
        self._place = (0, 0)
        self._seam = b""
        self._thread = threading.Thread(target=self._run, name="oomguard-live-words", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            came = self._recording.came
            if came == self._came:
                continue
            self._came = came
            new, self._place = self._recording.new_since(self._place)
            text = self._seam + new
            self._left -= text.count(self._words)
            # What is left of the end is shorter than the words, so nothing is counted twice.
            self._seam = text[max(0, len(text) - len(self._words) + 1) :]
            if self._left <= 0:
                self._then()
                return
