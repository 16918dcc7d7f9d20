"""Reading an input as numbered lines in constant memory: files, standard input, and the chunks of a running child."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from oomguard.errors import InputError

CHUNK_BYTES: Final = 1 << 20
MAX_SEGMENT_CHARS: Final = 1 << 16
_BOMS: Final = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True, slots=True)
class Line:
    """One line, or one segment of an over-long line (``continued``: it goes on from the segment before)."""

    number: int
    byte: int
    text: str
    continued: bool = False


class LineSplitter:
    """Cut chunks of bytes into lines: ends at newline or bare carriage return, invalid bytes replaced.

    A progress bar's carriage returns end a segment, not a numbered line; a line longer than ``MAX_SEGMENT_CHARS``
    comes in segments, so that no input makes memory grow.
    """

    def __init__(self, encoding: str = "utf-8", first_byte: int = 0) -> None:
        # Invalid bytes are kept apart (surrogateescape) until their length has been counted.
        self._wide = encoding.startswith("utf-16")
        self._decoder = codecs.getincrementaldecoder(encoding)("replace" if self._wide else "surrogateescape")
        self._pending = ""
        self._number, self._byte, self._continued = 1, first_byte, False

    def feed(self, chunk: bytes, *, final: bool = False) -> Iterator[Line]:
        """Yield the lines that the chunk completes; with ``final`` also the last one, whether it ended or not."""
        self._pending += self._decoder.decode(chunk, final)
        *lines, self._pending = self._pending.split("\n")
        for line in lines:
            yield from self._pieces(line)
            self._number += 1
            self._byte += 2 if self._wide else 1
            self._continued = False
        while len(self._pending) > MAX_SEGMENT_CHARS:
            yield from self._pieces(self._pending[:MAX_SEGMENT_CHARS])
            self._pending = self._pending[MAX_SEGMENT_CHARS:]
            self._continued = True
        if final and self._pending:
            yield from self._pieces(self._pending)
            self._pending = ""

    def _pieces(self, line: str) -> Iterator[Line]:
        """One numbered line: what stands between carriage returns, and over-long pieces in segments."""
        bars = line.split("\r")
        for i, bar in enumerate(bars):
            if bar or len(bars) == 1:
                for start in range(0, max(1, len(bar)), MAX_SEGMENT_CHARS):
                    yield self._segment(bar[start : start + MAX_SEGMENT_CHARS])
                    self._continued = True
            if i < len(bars) - 1:
                self._byte += 2 if self._wide else 1
                self._continued = False

    def _segment(self, text: str) -> Line:
        at, size = self._byte, len(text)
        if self._wide:
            size = len(text.encode("utf-16-le", "surrogatepass"))
        elif not text.isascii():
            raw = text.encode("utf-8", "surrogateescape")
            size, text = len(raw), raw.decode("utf-8", "replace")
        self._byte += size
        return Line(self._number, at, text, self._continued)


def open_log(path: str) -> IO[bytes]:
    """Open a log for reading; raises InputError with the reason where that cannot be done."""
    try:
        if Path(path).is_dir():
            raise InputError(f"{path}: is a folder", hint=f"name the files in it: oomguard diagnose {path}/*")
        return Path(path).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: {reason}", hint="give the path of a log, or - for standard input") from None


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """The lines of a byte stream; UTF-16 (PowerShell's redirection) is told by its mark, anything else is UTF-8."""
    head = stream.read(CHUNK_BYTES)
    encoding, first_byte = next(((name, len(bom)) for bom, name in _BOMS if head.startswith(bom)), ("utf-8", 0))
    splitter = LineSplitter(encoding, first_byte)
    while head:
        yield from splitter.feed(head)
        head = stream.read(CHUNK_BYTES)
    yield from splitter.feed(b"", final=True)
