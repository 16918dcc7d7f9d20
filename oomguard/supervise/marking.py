"""Look for anchors in what a command has printed, beside the copying: which parts of a long output are worth keeping."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from oomguard.observe.anchors import Finder
from oomguard.supervise.process_control import stand_back
from oomguard.supervise.recording import Recording

# An anchor that begins in one slot and ends in the next is found with so much of the one before.
_SEAM_BYTES: Final = 4096
_COUNTED_BYTES: Final = 1 << 16
# Output that comes faster than this cannot be looked through in time, and looking would only slow it down: then most of the
# time is rest. What waits when the command ends is looked through then.
_FLOOD_BYTES_A_S: Final = 256 << 20
_REST_RATIO: Final = 12
_REST_S: Final = 0.05
# The copying thread waits so long at most for one that loads the rules.
_SWITCH_S: Final = 0.0005


class Marker:
    """A thread that marks the slots of a recording; it starts with the first output too long to be kept whole.

    Args:
        make_finder: makes the finder of anchors, in the thread.
        also: gets each slot's number and what each stream printed into it, before it may be dropped.
    """

    def __init__(
        self,
        make_finder: Callable[[], Finder],
        also: Callable[[int, Mapping[int, bytes]], None] = lambda _number, _parts: None,
    ) -> None:
        self._make_finder, self._also = make_finder, also
        self._waiting = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self.recording = Recording(self._wake)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="oomguard-marker", daemon=True)
            self._thread.start()
        self._waiting.set()

    def stop(self) -> None:
        """End the thread; what it has not reached stays unmarked."""
        self._stopped = True
        self._waiting.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        stand_back()
        finder, seams = self._make_finder(), dict[int, bytes]()
        while not self._stopped:
            slot = self.recording.unmarked()
            if slot is None:
                self._waiting.clear()
                if self.recording.unmarked() is None:
                    self._waiting.wait()
                continue
            began_s, came = time.monotonic(), self.recording.came
            parts = self.recording.read(slot)
            anchored = any(
                finder.holds(data) or finder.holds(seams.get(stream, b"") + data[:_SEAM_BYTES])
                for stream, data in parts.items()
            )
            seams |= {stream: data[-_SEAM_BYTES:] for stream, data in parts.items()}
            self._also(slot.number, parts)
            self.recording.mark(slot, anchored=anchored, newlines={s: _newlines(data) for s, data in parts.items()})
            took_s = time.monotonic() - began_s
            if self.recording.came - came > _FLOOD_BYTES_A_S * took_s:
                time.sleep(min(_REST_RATIO * took_s, _REST_S))


def _newlines(data: bytes) -> int:
    """Count them a little at a time: the copying thread needs the interpreter in between."""
    count = 0
    for start in range(0, len(data), _COUNTED_BYTES):
        count += data.count(b"\n", start, start + _COUNTED_BYTES)
        time.sleep(0)
    return count
