"""Parse the recorded output of a command: failures, figures, and its last exception."""

from __future__ import annotations

import functools
import heapq
import itertools
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, cast

from oomguard.core.files import read_tables
from oomguard.core.incident import Diagnosis, Patch, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.text import strip_escapes
from oomguard.rules.rule_files import RuleSet
from oomguard.scan.anchors import Finder, InputPosition, finder, skim
from oomguard.scan.engine_errors import passes_on
from oomguard.scan.lines import TRACEBACK, peel
from oomguard.scan.scan import Scanner, scan
from oomguard.scan.source import Gap, Line
from oomguard.supervisor.output_buffer import DroppedOutput, RecordedOutput

# An exception that was handled may be printed too, and one raised during handling shows both. Only
# the last traceback ended the program, with the tracebacks that it names as its direct cause.
TAIL_BYTES: Final = 1 << 18
_HEAD: Final = f"{TRACEBACK}:"
_CAUSE: Final = "The above exception was the direct cause of the following exception:"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:\([\w.]+\))?(?::|\s*$)")
# After its traceback a program prints little more than messages of the interpreter and loggers.
_MOST_BEHIND: Final = 40


@dataclass(frozen=True, slots=True)
class FinalTraceback:
    """Hold the last traceback: its exception line, and its lines with its direct causes."""

    exception: str
    lines: tuple[str, ...]

    @property
    def passes_on(self) -> bool:
        """Whether the exception only says that another process failed."""
        return passes_on(self.exception)

    @property
    def is_of_a_test(self) -> bool:
        """Whether it only compares texts, like unittest: ``AssertionError: 'one' != 'other'``."""
        return self.exception.startswith(("AssertionError: '", 'AssertionError: "'))


def final_traceback(tail: bytes) -> FinalTraceback | None:
    """Return the traceback at the end of the output; None if the output does not end with one."""
    texts = _UnprefixedLines(tail)
    head = None
    for i in range(len(texts) - 1, -1, -1):
        if texts.is_head(i) and not _above(texts, i).startswith(_not_the_end()):
            head = i
            break
    if head is None:
        return None
    end = None
    for i in range(head + 1, len(texts)):
        if _ends(texts[i]):
            end = i
            break
    if end is None or not _EXCEPTION.match(texts[end]):
        return None
    behind = (i for i in range(end + 1, len(texts)) if texts[i].strip())
    if next(itertools.islice(behind, _MOST_BEHIND, None), None) is not None:
        return None
    first = head
    while (before := _direct_cause(texts, first)) is not None:
        first = before
    return FinalTraceback(texts[end].strip(), tuple(texts[i] for i in range(first, len(texts))))


class _UnprefixedLines:
    """Provide the lines of an output without prefixes, each computed only when it is used."""

    def __init__(self, output: bytes) -> None:
        self._lines = output.decode("utf-8", "replace").splitlines()
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, at: int) -> str:
        if at not in self._texts:
            self._texts[at] = peel(strip_escapes(self._lines[at])).text
        return self._texts[at]

    def is_head(self, at: int) -> bool:
        """Return whether a traceback begins on a line."""
        return _HEAD[:9] in strip_escapes(self._lines[at]) and self[at].startswith(_HEAD)


def _ends(text: str) -> bool:
    """Return whether a line after a traceback's head is not a frame (not indented, not empty)."""
    return bool(text.strip()) and not text.startswith((" ", "\t"))


def _direct_cause(texts: _UnprefixedLines, head: int) -> int | None:
    """Return the start of the direct cause of the traceback at ``head``; None if it names none."""
    if not _above(texts, head).startswith(_CAUSE):
        return None
    for i in range(head - 1, -1, -1):
        if texts.is_head(i):
            return i
    return None


def _above(texts: _UnprefixedLines, at: int) -> str:
    """Return the nearest line above that is not empty; "" if there is none."""
    for i in range(at - 1, max(-1, at - 5), -1):
        if texts[i].strip():
            return texts[i]
    return ""


@functools.cache
def _not_the_end() -> tuple[str, ...]:
    table = next(
        iter(read_tables("wrappers", [Path(__file__).with_name("wrappers.toml")]).values())
    )
    return tuple(table["not_the_end"])


LIMIT_S: Final = 20.0
END_BYTES: Final = 1 << 20


@dataclass(slots=True)
class _Stretch:
    """Hold one stream's output without gaps.

    Each piece is an offset in the file, a length, and a position in all output.
    """

    start: InputPosition
    pieces: list[tuple[int, int, int]] = field(default_factory=list)


def replay(
    recording: RecordedOutput,
    rules: RuleSet,
    make_finder: Callable[[], Finder],
    *,
    unrecognized: bool = False,
) -> Scanner:
    """Feed the recorded output to a scanner in its original order.

    Lines, numbers and offsets are the same as in a file of the same bytes. Output that consists
    only of failures takes minutes to read. After ``LIMIT_S`` only its end is read, and a warning
    says so.
    """
    now_s = 0.0
    # The scanner asks for the time of the line that it reads, not for the time of day.
    scanner = Scanner(rules, lambda: now_s, unrecognized=unrecognized)
    streams = []
    for stream, stretches in _stretches(recording).items():
        streams.append(_lines(stream, stretches, recording, make_finder))
    began_s = time.monotonic()
    end = recording.came - END_BYTES
    left_out = 0
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
            "oomguard did not read a part of the output",
            lines=left_out,
            reason=f"reading took over {LIMIT_S:.0f} s",
        )
    return scanner


def _stretches(recording: RecordedOutput) -> dict[int, list[_Stretch]]:
    found: dict[int, list[_Stretch]] = {}
    missing: dict[int, DroppedOutput] = {}
    came = 0
    for part in recording.kept():
        if isinstance(part, DroppedOutput):
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


def _behind(
    own: list[_Stretch], gap: DroppedOutput | None, number: int, recording: RecordedOutput
) -> InputPosition:
    """Return the start of a stretch: after the one before it and the missing output between."""
    place = InputPosition()
    if own:
        before = own[-1]
        newlines = sum(recording.newlines(at, length) for at, length, _ in before.pieces)
        size = sum(length for _, length, _ in before.pieces)
        place = InputPosition(before.start.line + newlines, before.start.byte + size)
    if gap is not None:
        place.line += gap.newlines.get(number, 0)
        place.byte += gap.sizes.get(number, 0)
        place.inside = gap.inside.get(number, False)
    return place


def _lines(
    number: int,
    stretches: list[_Stretch],
    recording: RecordedOutput,
    make_finder: Callable[[], Finder],
) -> Iterator[tuple[int, int, int, Line | Gap]]:
    """Yield a stream's lines with their position, the stream, and a count that keeps the order."""
    count = came = 0
    for index, stretch in enumerate(stretches):
        starts = []
        at = stretch.start.byte
        for _, length, _ in stretch.pieces:
            starts.append(at)
            at += length
        source = cast("IO[bytes]", _Pieces(recording, stretch.pieces))
        first = stretch.start.byte
        if index:
            yield came, number, count, Gap()
            count += 1
        for item in skim(
            source, make_finder, InputPosition(stretch.start.line, first, stretch.start.inside)
        ):
            if not isinstance(item, Gap):
                end = item.byte + len(item.text)
                piece = max(0, bisect_right(starts, end) - 1)
                came = max(came, stretch.pieces[piece][2] + end - starts[piece])
            yield came, number, count, item
            count += 1


class _Pieces:
    """Read a stretch as a stream of bytes."""

    def __init__(self, recording: RecordedOutput, pieces: list[tuple[int, int, int]]) -> None:
        self._recording = recording
        self._pieces = pieces
        self._index = 0
        self._done = 0

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
                self._index = self._index + 1
                self._done = 0
        return filled

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(memoryview(buffer))])


_ALWAYS: Final = {"kv_cache_available_bytes", "kv_cache_capacity_tokens"}


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Hold the scanned output of an attempt.

    Attributes:
        scanner: the scanner that read it.
        ended_of: the exception that ended the command, if it is unrelated to memory; None
            otherwise.
        tail: the end of both streams, if the command failed.
    """

    scanner: Scanner
    ended_of: str | None = None
    tail: str = ""

    def or_engine_log(
        self,
        scanned: Diagnosis,
        said: tuple[Line, ...],
        rules: RuleSet,
        given: Mapping[str, SettingInForce],
    ) -> Diagnosis:
        """Return the findings, or those of the engine's own log if there are none.

        The log helps if the command wrote its output to a file. It is ignored if the output
        contains its last line.
        """
        if said:
            last = said[-1].text.rpartition("] ")[2].strip()
        else:
            last = ""
        is_unread = bool(last) and last not in self.tail and not scanned.incidents
        if is_unread:
            return scan(said, rules, "", given=given, unrecognized=True)
        return scanned

    def comparable(self, patches: Iterable[Patch]) -> dict[str, float]:
        """Return the printed figures that a prediction can be compared with, plus the KV cache."""
        wanted = set(_ALWAYS).union(*(patch.predicts for patch in patches))
        found = {}
        for name, value in self.scanner.measured.items():
            if name in wanted:
                found[name] = value
        return found


def parse_output(recording: RecordedOutput, status: int, rules: RuleSet) -> ParsedOutput:
    """Parse the recorded output of a command that ended with ``status``."""
    if recording.failed:
        get_logger().warning("oomguard did not read a part of the output", reason=recording.failed)

    def make_finder() -> Finder:
        return finder(rules.anchors)

    if not status:
        return ParsedOutput(replay(recording, rules, make_finder))
    tail = b"\n".join(recording.tail(stream, TAIL_BYTES) for stream in (1, 2)).decode(
        "utf-8", "replace"
    )
    scanner = replay(recording, rules, make_finder, unrecognized=True)
    return ParsedOutput(scanner, _other_end(recording, rules), tail)


def _other_end(recording: RecordedOutput, rules: RuleSet) -> str | None:
    words = final_traceback(recording.tail(2, TAIL_BYTES)) or final_traceback(
        recording.tail(1, TAIL_BYTES)
    )
    if words is None or words.passes_on:
        return None
    if words.is_of_a_test:
        return words.exception
    lines = (Line(number, 0, text) for number, text in enumerate(words.lines, 1))
    if scan(lines, rules, unrecognized=True).incidents:
        return None
    return words.exception
