"""Diagnose what a recording has kept: the same lines, numbers and offsets as in a file of the same bytes."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Final, cast

from oomguard.log import get_logger
from oomguard.observe.scan import Scanner
from oomguard.observe.skim import Gap, Place, skim
from oomguard.supervisor.output_buffer import Missing, RecordedOutput

LIMIT_S: Final = 20.0
END_BYTES: Final = 1 << 20

if TYPE_CHECKING:
    from oomguard.observe.anchors import Finder
    from oomguard.observe.source import Line
    from oomguard.rules.load import RuleSet


@dataclass(slots=True)
class _Stretch:
    """What one stream printed without anything missing; pieces as offset in the file, length, and place in all output."""

    start: Place
    pieces: list[tuple[int, int, int]] = field(default_factory=list)


def replayed(
    recording: RecordedOutput, rules: RuleSet, make_finder: Callable[[], Finder], *, unrecognized: bool = False
) -> Scanner:
    """Feed a scanner with what is kept, in the order in which it came; ``unrecognized`` as in ``Scanner``.

    An output of nothing but failures takes minutes to read: after ``LIMIT_S`` only its end is read, and a warning says so.
    """
    now_s = 0.0
    scanner = Scanner(rules, lambda: now_s, unrecognized=unrecognized)
    streams = [_lines(number, stretches, recording, make_finder) for number, stretches in _stretches(recording).items()]
    began_s, end, left_out = time.monotonic(), recording.came - END_BYTES, 0
    for came, number, _, item in heapq.merge(*streams, key=lambda row: row[:3]):
        if came < end and time.monotonic() - began_s > LIMIT_S:
            if not left_out:
                scanner.push(Gap(), str(number))
            left_out += 1
            continue
        now_s = recording.printed_s(came)
        scanner.push(item, str(number))
    if left_out:
        get_logger().warning(
            "a part of the output is not diagnosed", lines=left_out, reason=f"reading took over {LIMIT_S:.0f} s"
        )
    return scanner


def _stretches(recording: RecordedOutput) -> dict[int, list[_Stretch]]:
    found: dict[int, list[_Stretch]] = {}
    missing: dict[int, Missing] = {}
    came = 0
    for part in recording.kept():
        if isinstance(part, Missing):
            missing |= dict.fromkeys(part.sizes, part)
            came += sum(part.sizes.values())
            continue
        for number, at, length in part.spans():
            own = found.setdefault(number, [])
            if not own or number in missing:
                own.append(_Stretch(_behind(own, missing.pop(number, None), number, recording)))
            own[-1].pieces.append((at, length, came))
            came += length
    return found


def _behind(own: list[_Stretch], gap: Missing | None, number: int, recording: RecordedOutput) -> Place:
    """Return where a stretch begins: behind the one before it and what is missing between."""
    place = Place()
    if own:
        before = own[-1]
        newlines = sum(recording.newlines(at, length) for at, length, _ in before.pieces)
        size = sum(length for _, length, _ in before.pieces)
        place = Place(before.start.line + newlines, before.start.byte + size)
    if gap is not None:
        place.line += gap.newlines.get(number, 0)
        place.byte += gap.sizes.get(number, 0)
        place.inside = gap.inside.get(number, False)
    return place


def _lines(
    number: int, stretches: list[_Stretch], recording: RecordedOutput, make_finder: Callable[[], Finder]
) -> Iterator[tuple[int, int, int, Line | Gap]]:
    """Yield a stream's lines, each with its place in all output, the stream and a count that keeps the order."""
    count = came = 0
    for index, stretch in enumerate(stretches):
        starts, at = [], stretch.start.byte
        for _, length, _ in stretch.pieces:
            starts.append(at)
            at += length
        source = cast("IO[bytes]", _Pieces(recording, stretch.pieces))
        first = stretch.start.byte
        if index:
            yield came, number, count, Gap()
            count += 1
        for item in skim(source, make_finder, Place(stretch.start.line, first, stretch.start.inside)):
            if not isinstance(item, Gap):
                end = item.byte + len(item.text)
                piece = max(0, bisect_right(starts, end) - 1)
                came = max(came, stretch.pieces[piece][2] + end - starts[piece])
            yield came, number, count, item
            count += 1


class _Pieces:
    """A stretch as a stream of bytes."""

    def __init__(self, recording: RecordedOutput, pieces: list[tuple[int, int, int]]) -> None:
        self._recording, self._pieces = recording, pieces
        self._index, self._done = 0, 0

    def readinto(self, view: memoryview) -> int:
        filled = 0
        while filled < len(view) and self._index < len(self._pieces):
            at, length, _ = self._pieces[self._index]
            wanted = min(length - self._done, len(view) - filled)
            count = self._recording.read_into(view[filled : filled + wanted], at + self._done)
            if not count:
                break
            filled += count
            self._done += count
            if self._done == length:
                self._index, self._done = self._index + 1, 0
        return filled

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(memoryview(buffer))])
