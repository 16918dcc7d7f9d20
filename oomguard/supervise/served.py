"""Requests that a command served, as its server's own lines tell: which lines those are is the engines' data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from oomguard.engines.effects import RequestLine, engine_effects
from oomguard.supervisor.output_buffer import RecordedOutput, Slot

# So many are "many": beyond it nothing is looked for any more.
MOST: Final = 1000
# A line that begins in one slot and ends in the next is put together from so much of the first.
_SEAM_BYTES: Final = 4096
_STEP_BYTES: Final = 1 << 16


@dataclass(slots=True)
class ServedRequests:
    """Counts lines, slot by slot: when the command has ended."""

    _counts: dict[bytes, int] = field(default_factory=dict)
    _some: bool = False
    _taken: set[int] = field(default_factory=set)
    _ends: dict[int, tuple[int, bytes]] = field(default_factory=dict)

    @property
    def count(self) -> int | None:
        """The least number of requests served, 0 where no line tells of any; None: there were some, and nothing says how many."""
        most = max(self._counts.values(), default=0)  # two lines may tell of the same request
        return most or (None if self._some else 0)

    def take(self, number: int, parts: Mapping[int, bytes]) -> None:
        """Count in one slot; ``parts`` is what each stream printed into it."""
        self._taken.add(number)
        for stream, data in parts.items():
            before, seam = self._ends.pop(stream, (-2, b""))
            first, whole = data.find(b"\n") + 1, data.rfind(b"\n") + 1
            if before == number - 1:
                self._count(seam + data[: first or None], 0, len(seam) + first)
            else:
                first, seam = 0, b""
            self._count(data, first, whole)
            end = data[max(whole, len(data) - _SEAM_BYTES) :]
            self._ends[stream] = number, end if whole else (seam + end)[-_SEAM_BYTES:]

    def take_rest(self, recording: RecordedOutput) -> None:
        """Count in the slots that are kept and were not counted yet; nothing follows them."""
        for part in recording.kept():
            if isinstance(part, Slot) and part.number not in self._taken:
                self.take(part.number, recording.read(part))
        for _, end in self._ends.values():
            self._count(end, 0, len(end))
        self._ends.clear()

    def _count(self, data: bytes, start: int, stop: int) -> None:
        """Count in whole lines, a few at a time: the copying thread needs the interpreter in between."""
        while start < stop:
            reach = min(stop, start + _STEP_BYTES)
            end = data.rfind(b"\n", start, reach) + 1 or data.find(b"\n", reach, stop) + 1 or stop
            for line in engine_effects().requests:
                so_far = self._counts.get(line.anchor, 0)
                if so_far < MOST and (line.counts or not self._some) and data.find(line.anchor, start, end) >= 0:
                    found = _requests(line, data, start, end, MOST - so_far)
                    if line.counts:
                        self._counts[line.anchor] = so_far + found
                    else:
                        self._some = self._some or found > 0
            start = end
            time.sleep(0)


def _requests(line: RequestLine, data: bytes, start: int, stop: int, most: int) -> int:
    found = 0
    for match in line.pattern.finditer(data, start, stop):
        path = match.groupdict().get("path")
        found += path is None or path.rstrip(b"/") not in engine_effects().not_requests
        if found >= most:
            break
    return found
