"""Read gzip, zstd, xz and bzip2 in constant memory, recognized by their first bytes.

The reader returns as much of damaged data as possible and sets ``damage``. It does not raise in the
middle of a log.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, Protocol

from oomguard.core.errors import InputError
from oomguard.core.installation import install_hint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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


@dataclass(frozen=True, slots=True)
class CompressedFormat:
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
        raise InputError(
            f"{name}: is {form.name} data, and the package that reads it is missing",
            hint=install_hint("zstd"),
        ) from None
