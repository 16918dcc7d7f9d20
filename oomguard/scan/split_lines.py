"""Join the pieces into which a container runtime cuts a long line: ``P`` tags each piece that
another one follows, ``F`` the last.

The form is that of Kubernetes' container runtimes (CRI): ``STAMP stderr P text``; fluent-bit keeps
the tag in its JSON. Docker's JSON has
none: a piece of 16 KiB without a line break goes on. Other runtimes cut at 16 KiB unless they are
told another size; pieces of standard
output and error may take turns, and a rotation may part them (``rotation``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError
from oomguard.scan.skim import Gap
from oomguard.scan.source import MAX_SEGMENT_CHARS, Line, open_log, read_lines

_PIECE: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?P<stream>std(?:out|err)) (?P<tag>[PF])(?::\S*)? "
)


_TAGS: Final = ("logtag", "_p")
# moby/daemon/logger/copier.go, 28: its buffer, whose last character may be cut.
_DOCKER_BYTES: Final = (16 << 10) - 4


@dataclass(slots=True)
class _Begun:
    """A line of which pieces have come: the first with its stamp, the words of all of them;
    ``record``: of JSON, the first one.
    """

    first: Line
    texts: list[str]
    chars: int
    record: dict[str, Any] | None = None

    @property
    def line(self) -> Line:
        whole = "".join(self.texts)
        if self.record is not None:
            whole = json.dumps({**self.record, "log": whole}, ensure_ascii=False)
        return replace(self.first, text=whole)


class Pieces:
    """Takes lines and gives whole ones; all that is not tagged passes as it is.

    Args:
        begun_before: streams whose line began in a log before this one, which tells it: what comes
            of it here is dropped.
    """

    def __init__(self, begun_before: Iterable[str] = ()) -> None:
        self._begun: dict[str, _Begun] = {}
        self._before = set(begun_before)
        self._last: tuple[str, bool] | None = (
            None  # of the line before: its stream, and whether more follows its piece
        )

    @property
    def open(self) -> frozenset[str]:
        """The streams whose last line so far is not whole."""
        return frozenset(self._begun)

    def feed(self, line: Line) -> Iterator[Line]:
        """Yield the lines that are whole now: at the place of their first piece."""
        if (
            line.continued and self._last is not None and self._last[1]
        ):  # one piece is longer than a segment
            yield from self._add(self._last[0], line, line.text)
            return
        if line.continued:
            found = None
        else:
            found = piece(line.text, may_end=bool(self._begun))
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
                record = _record(line.text)
                self._begun[stream] = _Begun(
                    line, [line.text if record is None else text], len(line.text), record
                )
            return
        begun.texts.append(text)
        begun.chars += len(text)
        if begun.chars > MAX_SEGMENT_CHARS:  # no line makes memory grow
            yield begun.line
            self._begun[stream] = _Begun(replace(line, continued=True), [], 0, begun.record)

    def end(self) -> Iterator[Line]:
        """Yield what has come of lines whose last piece has not."""
        begun = self._begun
        self._begun = {}
        self._last = None
        yield from sorted(
            (one.line for one in begun.values() if one.texts), key=lambda line: line.byte
        )


def piece(text: str, *, may_end: bool = False) -> tuple[str, str, str] | None:
    """Return stream, tag and words of a line of a container runtime; None for any other line.

    ``may_end``: a line has begun, so that JSON without a tag may be its end.
    """
    if text.startswith("{"):
        is_asked = may_end or len(text) > _DOCKER_BYTES or any(f'"{tag}"' in text for tag in _TAGS)
        if is_asked:
            return _json_piece(text)
        return None
    found = _PIECE.match(text)
    return found and (found["stream"], found["tag"], text[found.end() :])


def _json_piece(text: str) -> tuple[str, str, str] | None:
    record = _record(text)
    if record is None:
        return None
    log = record["log"]
    stream = str(record.get("stream", ""))
    tag = next((record[name] for name in _TAGS if record.get(name) in ("P", "F")), None)
    goes_on = not log.endswith("\n") and len(log.encode("utf-8", "replace")) >= _DOCKER_BYTES
    return stream, tag or ("P" if goes_on else "F"), log


def _record(text: str) -> dict[str, Any] | None:
    """Return the object of a collector that a line is; None for any other line."""
    try:
        if text.startswith("{"):
            record = json.loads(text)
        else:
            record = None
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("log"), str):
        return record
    return None


def joined(
    lines: Iterable[Line | Gap], begun_before: Iterable[str] = (), behind: Iterable[Line] = ()
) -> Iterator[Line | Gap]:
    """Yield lines with their pieces joined.

    Args:
        lines: with gaps where lines were left out.
        begun_before: as ``Pieces`` has it.
        behind: the lines of the log that goes on behind these; read only where a line is not whole
            at the end.
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


# The logs of one container before and behind one that was rotated: a line that was cut between two
# of them is told where it began.
#
# The kubelet renames ``0.log`` to ``0.log.20251125-051410`` when it is full, packs it with the next
# rotation (``.gz``), and the runtime goes on in a new ``0.log`` (kubernetes
# pkg/kubelet/logs/container_log_manager.go, 1.34). Logs behind a URL are read alone.

_NAME: Final = re.compile(r"(?P<instance>\d+\.log)(?:\.(?P<at>\d{8}-\d{6})(?:\.gz)?)?")
# What a stream has printed last stands within so many lines of the end, and goes on within so many
# of the next log.
_LINES: Final = 4096


def begun_before(path: str) -> frozenset[str]:
    """Return the streams whose line, at the beginning of this log, began in the one before it."""
    if _begins_with_piece(path):
        before = log_before(path)
    else:
        before = None
    if before is None:
        found = []
    else:
        found = [told for line in before[1] if (told := piece(line.text)) is not None]
    tags = {stream: tag for stream, tag, _text in found}
    return frozenset(stream for stream, tag in tags.items() if tag == "P")


def log_before(path: str) -> tuple[Path, list[Line]] | None:
    """Return path and last lines of the log before this one; None where there is no such log, or it
    cannot be read.
    """
    before = _neighbour(path, -1)
    if before is None:
        return None
    with contextlib.suppress(OSError, InputError), open_log(str(before)) as stream:
        return before, list(deque(read_lines(stream), maxlen=_LINES))
    return None


def lines_behind(path: str) -> Iterator[Line]:
    """Yield the first lines of the log behind this one; none where there is no such log."""
    behind = _neighbour(path, 1)
    if behind is not None:
        with contextlib.suppress(OSError, InputError), open_log(str(behind)) as stream:
            for _, line in zip(range(_LINES), read_lines(stream), strict=False):
                yield line


def _neighbour(path: str, step: int) -> Path | None:
    """Return the log of the same container that was written just before (-1) or after
    (1) this one.
    """
    named_so = _named(path)
    if named_so is None:
        return None
    path, own = named_so
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError, ValueError):
        for other in sorted(
            Path(path).parent.iterdir()
        ):  # a log being packed is there twice: the packed one counts
            named = _NAME.fullmatch(other.name)
            if named is not None and named["instance"] == own["instance"]:
                found[named["at"] or "now"] = other
    order = sorted(found)  # digits come before letters: what is written now is the last
    if (own["at"] or "now") in order:
        at = order.index(own["at"] or "now") + step
    else:
        at = -1
    if 0 <= at < len(order):
        return found[order[at]]
    return None


def _named(path: str) -> tuple[str, re.Match[str]] | None:
    """Return where a log lies, and what its name says of its rotation; None of a name that no
    kubelet gives.
    """
    if "://" in path or ".log" not in path:
        return None
    with contextlib.suppress(OSError, ValueError):
        if os.path.islink(path):  # noqa: PTH114 - takes any name; as in /var/log/containers
            path = os.path.realpath(path)
    own = _NAME.fullmatch(Path(path).name)
    if own is None:
        return None
    return (path, own)


def _begins_with_piece(path: str) -> bool:
    """Return whether a log is a container runtime's, told by name and first line: no folder of
    thousands is listed.
    """
    if _named(path) is None:
        return False
    with contextlib.suppress(OSError, InputError), open_log(path) as stream:
        return piece(next((line.text for line in read_lines(stream)), "")) is not None
    return False
