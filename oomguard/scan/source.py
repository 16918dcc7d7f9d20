"""Read an input as numbered lines in constant memory: files, packed or growing, and pipes."""

from __future__ import annotations

import bz2
import codecs
import enum
import io
import lzma
import os
import re
import select
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from oomguard.core.errors import InputError
from oomguard.core.text import strip_escapes

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4 << 20
MAX_SEGMENT_CHARS: Final = 1 << 16
# UTF-16 without a mark shows in the first bytes: at least this many null bytes at every second
# position, and at most this many at the others.
_SAMPLE_BYTES: Final = 4096
_MANY_NULLS: Final = 0.5
_FEW_NULLS: Final = 0.05
_BOMS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Line(NamedTuple):
    """Hold one line, or a segment of an overlong line.

    ``number`` counts from 1, ``byte`` is the offset of its first byte. ``continued`` means that it
    continues the previous segment.
    """

    number: int
    byte: int
    text: str
    continued: bool = False


class Gap(NamedTuple):
    """Mark omitted lines: the next line does not continue the last one.

    Attributes:
        repeats: how many of them only repeat earlier lines.
    """

    repeats: int = 0


class LineSplitter:
    """Cut chunks of bytes into lines, replacing invalid bytes.

    A newline ends a line. A progress bar's carriage return ends a segment, not a numbered line. A
    line longer than ``MAX_SEGMENT_CHARS`` comes in segments, so memory stays limited.

    Args:
        encoding: a name for ``codecs``; offsets are exact for utf-8, utf-8-sig and utf-16.
        first_byte: the offset of the first byte.
        first_line: the number of its line.
        inside: whether it is inside that line, so the first segment continues one.
    """

    def __init__(
        self,
        encoding: str = "utf-8",
        first_byte: int = 0,
        *,
        first_line: int = 1,
        inside: bool = False,
    ) -> None:
        # Invalid bytes stay recognizable (surrogateescape) until their length is counted.
        self._wide = encoding.startswith("utf-16")
        self._decoder = codecs.getincrementaldecoder(encoding)(
            "replace" if self._wide else "surrogateescape"
        )
        self._pending = ""
        self._number = first_line
        self._byte = first_byte
        self._continued = inside

    def feed(self, chunk: bytes, *, final: bool = False) -> Iterator[Line]:
        """Yield the lines that the chunk completes; with ``final`` also an unfinished last one."""
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
        """Yield a numbered line in segments: between carriage returns, and of limited length."""
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
        at = self._byte
        size = len(text)
        if self._wide:
            size = len(text.encode("utf-16-le", "surrogatepass"))
        elif not text.isascii():
            raw = text.encode("utf-8", "surrogateescape")
            size = len(raw)
            text = raw.decode("utf-8", "replace")
        self._byte += size
        if "\0" in text:  # UTF-16 appended to another encoding (PowerShell's >>)
            text = text.replace("\0", "")
        return Line(self._number, at, text, self._continued)


def open_log(path: str, on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Open a log for reading, unpacking a compressed one.

    ``damage_of`` then reports whether it ended early.

    Args:
        path: the file.
        on_read: called with the number of the file's bytes of each read; None for none.

    Raises:
        InputError: with the reason why the file is unreadable.
    """
    try:
        about = Path(path).stat()
        _check_kind(about.st_mode, about.st_rdev, path)
        raw = io.FileIO(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{printable_path(path)}: {reason}",
            hint="give the path of a log, or - for standard input",
        ) from None
    return decompress(raw, path, on_read)


def open_standard_input(on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Open standard input, unpacking compressed data; ``on_read`` as in ``open_log``.

    Raises:
        InputError: it is closed, a folder or a device.
    """
    return decompress(raw_standard_input(), "-", on_read)


def raw_standard_input() -> io.FileIO:
    """Open standard input unbuffered and packed.

    Raises:
        InputError: it is closed, a folder or a device.
    """
    try:
        about = os.fstat(0)
    except OSError as error:
        raise InputError(
            f"-: standard input: {error.strerror}", hint="give a log file instead"
        ) from None
    _check_kind(about.st_mode, about.st_rdev, "-")
    return io.FileIO(0, "rb", closefd=False)


def damage_of(stream: IO[bytes]) -> str | None:
    """Return why a compressed stream ended early, or None."""
    if isinstance(stream, Unpacked):
        return stream.damage
    return None


def peek(stream: IO[bytes], size: int) -> tuple[bytes, IO[bytes]]:
    """Return the first ``size`` bytes of a stream, and the stream including them."""
    if stream.seekable():
        start = stream.tell()
    else:
        start = None
    head = b""
    while len(head) < size and (more := _next(stream, size - len(head))):
        head += more
    if start is None:
        return head, cast("IO[bytes]", _Handed(stream, head, None))
    stream.seek(start)
    return head, stream


def printable_path(path: str) -> str:
    """Return a path for a terminal: one line, without escapes or undecodable bytes."""
    text = strip_escapes(path.replace("\n", "\\n"))
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _check_kind(mode: int, device: int, path: str) -> None:
    """Reject folders, disks, and endless devices (/dev/zero); accept files, pipes and terminals."""
    if stat.S_ISDIR(mode):
        raise InputError(
            f"{printable_path(path)}: is a folder",
            hint=f"name the files in it: oomguard diagnose {printable_path(path)}/*",
        )
    terminal = path == "-" and os.isatty(0)
    if stat.S_ISBLK(mode) or (
        stat.S_ISCHR(mode) and not terminal and device != Path(os.devnull).stat().st_rdev
    ):
        raise InputError(
            f"{printable_path(path)}: is a device, not a log", hint="give the path of a log"
        )


def decompress(raw: IO[bytes], path: str, on_read: Callable[[int], None] | None) -> IO[bytes]:
    """Return the stream, unpacked if its first bytes show a compressed format."""
    try:
        if raw.seekable():
            start = raw.tell()
        else:
            start = None
        head = b""
        while len(head) < HEAD_BYTES and (more := _next(raw, HEAD_BYTES - len(head))):
            head += more
        form = format_of(head, path)
        if start is not None:
            raw.seek(start)
        if start is None or on_read is not None:
            raw = cast("IO[bytes]", _Handed(raw, head if start is None else b"", on_read))
        if form is None:
            return raw
        return cast("IO[bytes]", Unpacked(raw, form, printable_path(path)))
    except BaseException:
        raw.close()
        raise


class _Handed(io.RawIOBase):
    """Provide a stream including its first bytes.

    Reads fill whole blocks, even from a pipe, and call ``on_read``.
    """

    def __init__(self, raw: IO[bytes], head: bytes, on_read: Callable[[int], None] | None) -> None:
        super().__init__()
        self._raw = raw
        self._head = head
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if size >= 0:
            wanted = size
        else:
            wanted = sys.maxsize
        parts = [self._head[:wanted]]
        self._head = self._head[wanted:]
        size_bytes = len(parts[0])
        while size_bytes < wanted and (
            more := _next(self._raw, min(wanted - size_bytes, _BLOCK_BYTES))
        ):
            parts.append(more)
            size_bytes += len(more)
        if self._on_read is not None:
            self._on_read(size_bytes)
        return b"".join(part for part in parts if part)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        block = self.read(len(view))
        view[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _next(raw: IO[bytes], size: int) -> bytes:
    """Read some bytes, or nothing at the end.

    If another program made standard input non-blocking, it waits.
    """
    while (block := raw.read(size)) is None:
        select.select([raw], [], [])
    return block


def encoding_of(head: bytes) -> tuple[str, int]:
    """Return the encoding of the first bytes, and the length of its mark in bytes.

    Null bytes at every second position show UTF-16 without a mark, for mostly Latin text.
    """
    marked = next(((name, len(bom)) for bom, name in _BOMS if head.startswith(bom)), None)
    if marked is not None or b"\0" not in head[:4]:
        return marked or ("utf-8", 0)
    sample = head[:_SAMPLE_BYTES]
    even, odd = (sample[start::2].count(0) / max(1, len(sample) // 2) for start in (0, 1))
    if max(even, odd) < _MANY_NULLS or min(even, odd) > _FEW_NULLS:
        return "utf-8", 0
    return ("utf-16-le" if odd > even else "utf-16-be"), 0


def read_lines(stream: IO[bytes]) -> Iterator[Line]:
    """Yield the lines of a byte stream: UTF-16 by ``encoding_of`` (PowerShell), else UTF-8."""
    head = stream.read(CHUNK_BYTES)
    encoding, first_byte = encoding_of(head)
    splitter = LineSplitter(encoding, first_byte)
    while head:
        yield from splitter.feed(head)
        head = stream.read(CHUNK_BYTES)
    yield from splitter.feed(b"", final=True)


# Read gzip, zstd, xz and bzip2 in constant memory, recognized by their first bytes.
#
# The reader returns as much of damaged data as possible and sets ``damage``. It does not raise in
# the middle of a log.


HEAD_BYTES: Final = 10
_READ_BYTES: Final = 1 << 16
_UNPACKED_BYTES: Final = 1 << 20
_XZ_MEMORY_BYTES: Final = 100 << 20


class _Member(Protocol):
    """Unpack one compressed unit; a file may have several in a row."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        text = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        # A full output may continue even without further input.
        self.needs_input = len(text) < max_length
        return text


class _Zstd:
    """Unpack all input at once; ``Format.piece_bytes`` limits its size."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor().decompressobj()

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._frame.decompress(data)


class CompressedFormat(NamedTuple):
    """Describe one compressed format by its first bytes.

    ``piece_bytes`` is the number of packed bytes to unpack at once.
    """

    name: str
    suffixes: tuple[str, ...]
    begins: bytes
    magic: re.Pattern[bytes]
    member: Callable[[], _Member]
    piece_bytes: int = _READ_BYTES


# A zstd block of 4 bytes can represent 128 KiB, and the library does not limit its output: 1 KiB of
# input becomes 32 MiB.
FORMATS: Final = (
    CompressedFormat("gzip", (".gz", ".tgz"), b"\x1f\x8b\x08", re.compile(rb"\x1f\x8b\x08"), _Gzip),
    CompressedFormat(
        "zstd",
        (".zst", ".zstd"),
        b"\x28\xb5\x2f\xfd",
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        _Zstd,
        1024,
    ),
    CompressedFormat(
        "xz",
        (".xz",),
        b"\xfd7zXZ\0",
        re.compile(rb"\xfd7zXZ\0"),
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES),
    ),
    CompressedFormat(
        "bzip2",
        (".bz2",),
        b"BZh",
        re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
        bz2.BZ2Decompressor,
    ),
)
# Rejected archives: (name, suffix, first bytes, a command that unpacks it to standard output).
_ARCHIVES: Final = (
    ("a zip archive", ".zip", b"PK\x03\x04", "unzip -p"),
    ("a 7z archive", ".7z", b"7z\xbc\xaf\x27\x1c", "7z x -so"),
    ("a rar archive", ".rar", b"Rar!\x1a\x07", "unrar p -inul"),
    ("lz4 data", ".lz4", b"\x04\x22\x4d\x18", "lz4 -dc"),
    ("compress data", ".Z", b"\x1f\x9d", "gzip -dc"),
)


def format_of(head: bytes, name: str = "") -> CompressedFormat | None:
    """Return the format of the first ``HEAD_BYTES`` bytes, or None for plain text.

    The name counts only if the file is too short.

    Raises:
        InputError: it is an archive that oomguard does not read.
    """
    for form in FORMATS:
        cut = (
            len(head) < len(form.begins)
            and form.begins.startswith(head)
            and name.endswith(form.suffixes)
        )
        if form.magic.match(head) or cut:
            return form
    for what, suffix, begins, command in _ARCHIVES:
        if head.startswith(begins) and name.endswith(suffix):
            raise InputError(
                f"{name}: oomguard does not read {what}",
                hint=f"{command} FILE | oomguard diagnose -",
            )
    return None


class Unpacked(io.RawIOBase):
    """Provide the bytes in a compressed stream.

    ``damage`` is the reason why they ended early, or None.
    """

    def __init__(self, packed: IO[bytes], form: CompressedFormat, name: str) -> None:
        super().__init__()
        self._packed = packed
        self._form = form
        self._member = _new_member(form, name)
        self._input = b""
        self._at = 0
        self._ready = memoryview(b"")
        self._ended = self._source_ended = False
        self._size_bytes = 0
        self.damage: str | None = None

    def readable(self) -> bool:
        """Return True, because the stream is for reading."""
        return True

    def close(self) -> None:
        """Close the compressed stream too."""
        if not self.closed:
            self._packed.close()
        super().close()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer and return the number of bytes, 0 at the end or at damaged data."""
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            if not self._ready:
                text = self._unpack()
                if not text:
                    break
                self._ready = memoryview(text)
            part = self._ready[: len(view) - filled]
            view[filled : filled + len(part)] = part
            self._ready = self._ready[len(part) :]
            filled += len(part)
        return filled

    def _unpack(self) -> bytes:
        """Return the next unpacked bytes, or nothing at the end."""
        while not self._ended:
            try:
                if self._member.needs_input:
                    piece = self._next_piece()
                else:
                    piece = b""
                text = self._member.decompress(piece, _UNPACKED_BYTES)
                if self._member.eof:
                    self._begin_next()
                elif not text and not piece and self._source_ended and self._at >= len(self._input):
                    self._end("ends early")
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001
                # The four libraries raise errors of four families.
                self._end(f"is damaged ({error})")
                break
            if text:
                self._size_bytes += len(text)
                return text
        return b""

    def _next_piece(self) -> bytes:
        if self._at >= len(self._input) and not self._source_ended:
            self._input = self._packed.read(_READ_BYTES) or b""
            self._at = 0
            self._source_ended = not self._input
        piece = self._input[self._at : self._at + self._form.piece_bytes]
        self._at += len(piece)
        return piece

    def _begin_next(self) -> None:
        """Begin the next member, skipping padding; stop at unrelated bytes."""
        self._input = self._member.unused_data + self._input[self._at :]
        self._at = 0
        while not self._source_ended:
            self._input = self._input.lstrip(b"\0")
            if len(self._input) >= HEAD_BYTES:
                break
            more = self._packed.read(_READ_BYTES) or b""
            self._source_ended = not more
            self._input += more
        if not self._input:
            self._ended = True
        elif self._form.magic.match(self._input):
            self._member = self._form.member()
        else:
            self._end("is followed by bytes that are not")

    def _end(self, what: str) -> None:
        self._ended = True
        self.damage = (
            f"the {self._form.name} data {what}; oomguard read {self._size_bytes} "
            "unpacked bytes before that"
        )


def _new_member(form: CompressedFormat, name: str) -> _Member:
    try:
        return form.member()
    except ImportError:
        from oomguard.core.installation import install_hint

        raise InputError(
            f"{name}: is {form.name} data, and the package that reads it is missing",
            hint=install_hint("zstd"),
        ) from None


# Follow a growing log like ``tail -F``: it may not exist yet, or be truncated or replaced.

POLL_S: Final = 0.2
QUIET_S: Final = 1.0


class LogChange(enum.Enum):
    """Name what happened to a followed log."""

    DATA = "more bytes"
    QUIET = "no new bytes for a while"
    WAITING = "the file does not exist yet"
    TRUNCATED = "the file was truncated; oomguard continues at its new start"
    REPLACED = "another file replaced it; oomguard continues at the start of that file"


class Event(NamedTuple):
    """Hold one change; ``data`` has the bytes of a ``DATA``."""

    change: LogChange
    data: bytes = b""


def follow(path: str, *, poll_s: float = POLL_S, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of the file at ``path``, endlessly.

    A removed file is read until another one has its name.

    Args:
        path: the file, which may not exist yet.
        poll_s: seconds between two checks of the file.
        quiet_s: seconds without bytes before one ``QUIET``; None for never.

    Raises:
        InputError: the file exists but is unreadable.
    """
    raw = None
    told = False
    while raw is None:
        try:
            raw = io.FileIO(path)
        except FileNotFoundError:
            if not told:
                yield Event(LogChange.WAITING)
                told = True
            time.sleep(poll_s)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{printable_path(path)}: {getattr(error, 'strerror', None) or error}"
            ) from None
    try:
        last_s: float | None = None
        while True:
            if data := raw.read(CHUNK_BYTES):
                last_s = time.monotonic()
                yield Event(LogChange.DATA, data)
                continue
            change, newer = _changed(raw, path)
            # Bytes between the last read and the change belong to the old file.
            if change is not None and change is not LogChange.TRUNCATED:
                while data := raw.read(CHUNK_BYTES):
                    yield Event(LogChange.DATA, data)
            if newer is not None:
                raw.close()
                raw = newer
            if change is not None:
                last_s = None
                yield Event(change)
                continue
            if last_s is not None and time.monotonic() - last_s >= quiet_s:
                last_s = None
                yield Event(LogChange.QUIET)
            time.sleep(poll_s)
    finally:
        raw.close()


def _changed(raw: io.FileIO, path: str) -> tuple[LogChange | None, io.FileIO | None]:
    """Return whether the open file was truncated or replaced, and the opened replacement."""
    own = os.fstat(raw.fileno())
    try:
        named = Path(path).stat()
        if (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            return LogChange.REPLACED, io.FileIO(path)
    except OSError:  # gone or unreadable for now: continue with the open one
        return None, None
    if own.st_size < raw.tell():
        raw.seek(0)
        return LogChange.TRUNCATED, None
    return None, None


def follow_stream(raw: io.FileIO, *, quiet_s: float = QUIET_S) -> Iterator[Event]:
    """Yield the events of a pipe or standard input until it ends, including quiet periods."""
    waiting = False
    while True:
        readable, _, _ = select.select([raw], [], [], quiet_s if waiting else None)
        if not readable:
            waiting = False
            yield Event(LogChange.QUIET)
            continue
        data = raw.read(CHUNK_BYTES)
        if data is None:
            continue
        if not data:
            return
        waiting = True
        yield Event(LogChange.DATA, data)
