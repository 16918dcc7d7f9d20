"""Join the pieces into which a container runtime cuts a long line: ``P`` tags each piece that another one follows, ``F`` the last.

The form is that of Kubernetes' container runtimes (CRI): ``STAMP stderr P text``. Runtimes cut at 16 KiB unless they are told another
size; pieces of standard output and error may take turns, and a rotation may part them (``rotation``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from oomguard.observe.skim import Gap
from oomguard.observe.source import MAX_SEGMENT_CHARS, Line

_PIECE: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?P<stream>std(?:out|err)) (?P<tag>[PF])(?::\S*)? "
)


@dataclass(slots=True)
class _Begun:
    """A line of which pieces have come: the first with its stamp, the words of all of them."""

    first: Line
    texts: list[str]
    chars: int

    @property
    def line(self) -> Line:
        return replace(self.first, text="".join(self.texts))


class Pieces:
    """Takes lines and gives whole ones; all that is not tagged passes as it is.

    Args:
        begun_before: streams whose line began in a log before this one, which tells it: what comes of it here is dropped.
    """

    def __init__(self, begun_before: Iterable[str] = ()) -> None:
        self._begun: dict[str, _Begun] = {}
        self._before = set(begun_before)
        self._last: tuple[str, bool] | None = None  # of the line before: its stream, and whether more follows its piece

    @property
    def open(self) -> frozenset[str]:
        """The streams whose last line so far is not whole."""
        return frozenset(self._begun)

    def feed(self, line: Line) -> Iterator[Line]:
        """Yield the lines that are whole now: at the place of their first piece."""
        if line.continued and self._last is not None and self._last[1]:  # one piece is longer than a segment
            yield from self._add(self._last[0], line, line.text)
            return
        found = None if line.continued else piece(line.text)
        if found is None:
            if not line.continued:
                self._last = None
            yield line
            return
        stream, tag, text = found
        self._last = (stream, tag == "P")
        if stream in self._before:
            if tag == "F":
                self._before.remove(stream)
        elif tag == "P":
            yield from self._add(stream, line, text)
        elif (begun := self._begun.pop(stream, None)) is None:
            yield line
        else:
            begun.texts.append(text)
            yield begun.line

    def _add(self, stream: str, line: Line, text: str) -> Iterator[Line]:
        begun = self._begun.get(stream)
        if begun is None:
            if stream not in self._before:
                self._begun[stream] = _Begun(line, [line.text], len(line.text))
            return
        begun.texts.append(text)
        begun.chars += len(text)
        if begun.chars > MAX_SEGMENT_CHARS:  # no line makes memory grow
            yield begun.line
            self._begun[stream] = _Begun(replace(line, continued=True), [], 0)

    def end(self) -> Iterator[Line]:
        """Yield what has come of lines whose last piece has not."""
        begun, self._begun, self._last = self._begun, {}, None
        yield from sorted((one.line for one in begun.values() if one.texts), key=lambda line: line.byte)


def piece(text: str) -> tuple[str, str, str] | None:
    """Return stream, tag and words of a line of a container runtime; None for any other line."""
    found = _PIECE.match(text)
    return found and (found["stream"], found["tag"], text[found.end() :])


def joined(
    lines: Iterable[Line | Gap], begun_before: Iterable[str] = (), behind: Iterable[Line] = ()
) -> Iterator[Line | Gap]:
    """Yield lines with their pieces joined.

    Args:
        lines: with gaps where lines were left out.
        begun_before: as ``Pieces`` has it.
        behind: the lines of the log that goes on behind these; read only where a line is not whole at the end.
    """
    pieces = Pieces(begun_before)
    for line in lines:
        if isinstance(line, Gap):
            yield from pieces.end()
            yield line
        else:
            yield from pieces.feed(line)
    still = set(pieces.open)
    for line in behind if still else ():
        found = piece(line.text)
        if found is not None and found[0] in still:
            yield from pieces.feed(line)
            still -= {found[0]} if found[1] == "F" else set()
        if not still:
            break
    yield from pieces.end()
