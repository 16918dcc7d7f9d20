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

    def __init__(self, encoding: str = "utf-8") -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        self._utf8 = encoding.startswith("utf-8")
        self._pending = ""
        self._number, self._byte, self._continued = 1, 0, False

    def feed(self, chunk: bytes, *, final: bool = False) -> Iterator[Line]:
        """Yield the lines that the chunk completes; with ``final`` also the last one, whether it ended or not."""
        self._pending += self._decoder.decode(chunk, final)
        if len(self._pending) > MAX_SEGMENT_CHARS or "\n" in self._pending or "\r" in self._pending or final:
            lines = self._pending.split("\n")
            self._pending = lines.pop()
            for line in lines:
                yield from self._segments(line)
                self._number += 1
                self._byte += 1
                self._continued = False
            while len(self._pending) > MAX_SEGMENT_CHARS:
                yield self._segment(self._pending[:MAX_SEGMENT_CHARS])
                self._pending = self._pending[MAX_SEGMENT_CHARS:]
                self._continued = True
            if final and self._pending:
                yield from self._segments(self._pending)
                self._pending = ""

    def _segments(self, line: str) -> Iterator[Line]:
        for start in range(0, max(1, len(line)), MAX_SEGMENT_CHARS):
            yield self._segment(line[start : start + MAX_SEGMENT_CHARS])
            self._continued = True

    def _segment(self, text: str) -> Line:
        line = Line(self._number, self._byte, text.rstrip("\r"), self._continued)
        self._byte += len(text.encode("utf-8", "surrogatepass")) if self._utf8 and not text.isascii() else len(text)
        return line


def open_log(path: str) -> IO[bytes]:
    """Open a log for reading; raises InputError with the reason where that cannot be done."""
    try:
        if Path(path).is_dir():
            raise InputError(f"{path}: is a folder", hint=f"name the files in it: oomguard diagnose {path}/*")
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}", hint="give the path of a log, or - for standard input"
        ) from None


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """The lines of a byte stream; UTF-16 (PowerShell's redirection) is told by its mark, anything else is UTF-8."""
    head = stream.read(CHUNK_BYTES)
    encoding = next((name for bom, name in _BOMS if head.startswith(bom)), "utf-8")
    splitter = LineSplitter(encoding)
    while head:
        yield from splitter.feed(head)
        head = stream.read(CHUNK_BYTES)
    yield from splitter.feed(b"", final=True)
