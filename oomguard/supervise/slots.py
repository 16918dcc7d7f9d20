"""The parts of a recording: a slot that is kept, and what is missing between two."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Slot:
    """A part of the output: where it lies in the file, and which pieces of it came from which stream.

    Attributes:
        number: counts from 0, in the order of arrival.
        at: where it begins in the file.
        size: bytes in it.
        pieces: ``length << 8 | stream``, in the order of arrival.
        anchored: whether an anchor lies in it; None until the marker has looked.
        newlines: by stream, once counted; None until then.
    """

    number: int
    at: int
    size: int = 0
    pieces: array[int] = field(default_factory=lambda: array("Q"))
    anchored: bool | None = None
    newlines: dict[int, int] | None = None

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield each piece as stream, offset in the file and length."""
        at = self.at
        for piece in self.pieces:
            yield piece & 0xFF, at, piece >> 8
            at += piece >> 8

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each stream."""
        found: dict[int, int] = {}
        for piece in self.pieces:
            found[piece & 0xFF] = found.get(piece & 0xFF, 0) + (piece >> 8)
        return found


@dataclass(slots=True)
class Missing:
    """What was dropped between two slots that are kept, by stream.

    Attributes:
        sizes: bytes.
        newlines: None where nobody counted them.
        inside: whether it ended within a line.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    newlines: dict[int, int] | None = field(default_factory=dict)
    inside: dict[int, bool] = field(default_factory=dict)

    def add(self, sizes: dict[int, int], newlines: dict[int, int] | None, inside: dict[int, bool]) -> None:
        """Count what was dropped behind it."""
        for stream, size in sizes.items():
            self.sizes[stream] = self.sizes.get(stream, 0) + size
        self.inside |= inside
        if newlines is None or self.newlines is None:
            self.newlines = None
            return
        for stream, count in newlines.items():
            self.newlines[stream] = self.newlines.get(stream, 0) + count
