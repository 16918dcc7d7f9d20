"""Join the pieces of long lines that a container runtime cut.

The form is that of Kubernetes' container runtimes (CRI): ``STAMP stderr P text``. ``P`` tags a
piece that another one follows, ``F`` the last one; fluent-bit stores the tag in its JSON. Docker's
JSON has none: a piece of 16 KiB without a line break continues. Other runtimes cut at 16 KiB by
default. Pieces of standard output and error may alternate, and a rotation may separate them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import InputError
from oomguard.scan.skim import Gap
from oomguard.scan.source import MAX_SEGMENT_CHARS, Line, open_log, read_lines

_PIECE: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?P<stream>std(?:out|err)) (?P<tag>[PF])(?::\S*)? "
)


_TAGS: Final = ("logtag", "_p")
# The buffer of moby/daemon/logger/copier.go, 28, whose last character may be cut.
_DOCKER_BYTES: Final = (16 << 10) - 4


@dataclass(slots=True)
class _Begun:
    """Hold an unfinished line: its first piece with the time stamp, and all words so far.

    ``record`` is the first JSON object.
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
        return self.first._replace(text=whole)


class Pieces:
    """Join pieces to whole lines; lines without a tag pass unchanged.

    Args:
        begun_before: streams whose line began in the previous log, which already has it; its rest
            is dropped here.
    """

    def __init__(self, begun_before: Iterable[str] = ()) -> None:
        self._begun: dict[str, _Begun] = {}
        self._before = set(begun_before)
        self._last: tuple[str, bool] | None = (
            None  # of the previous line: its stream, and whether another piece follows
        )

    @property
    def open(self) -> frozenset[str]:
        """Return the streams whose last line is not complete."""
        return frozenset(self._begun)

    def feed(self, line: Line) -> Iterator[Line]:
        """Yield the lines that are now complete, at the position of their first piece."""
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
        if begun.chars > MAX_SEGMENT_CHARS:  # limits memory
            yield begun.line
            self._begun[stream] = _Begun(line._replace(continued=True), [], 0, begun.record)

    def end(self) -> Iterator[Line]:
        """Yield the unfinished lines."""
        begun = self._begun
        self._begun = {}
        self._last = None
        yield from sorted(
            (one.line for one in begun.values() if one.texts), key=lambda line: line.byte
        )


def piece(text: str, *, may_end: bool = False) -> tuple[str, str, str] | None:
    """Return stream, tag and words of a container runtime's line, or None.

    ``may_end`` means that a line has begun, so JSON without a tag may be its end.
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
    """Return the collector's object on a line, or None."""
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


def join_pieces(
    lines: Iterable[Line | Gap], begun_before: Iterable[str] = (), behind: Iterable[Line] = ()
) -> Iterator[Line | Gap]:
    """Yield lines with their pieces joined.

    Args:
        lines: the lines, with gaps for omitted lines.
        begun_before: as for ``Pieces``.
        behind: the lines of the next log; read only if a line is unfinished at the end.
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


# A rotation may cut a line between two logs of one container. It then belongs to the log where it
# began.
#
# The kubelet renames a full ``0.log`` to ``0.log.20251125-051410``, compresses it at the next
# rotation (``.gz``), and the runtime continues in a new ``0.log`` (kubernetes
# pkg/kubelet/logs/container_log_manager.go, 1.34). Logs behind a URL are read alone.

_NAME: Final = re.compile(r"(?P<instance>\d+\.log)(?:\.(?P<at>\d{8}-\d{6})(?:\.gz)?)?")
# A stream's last output is within this many lines of the end, and continues within as many of the
# next log.
_LINES: Final = 4096


def begun_before(path: str) -> frozenset[str]:
    """Return the streams whose first line here began in the previous log."""
    if _begins_with_piece(path):
        before = log_before(path)
    else:
        before = None
    if before is None:
        found = []
    else:
        found = [tagged for line in before[1] if (tagged := piece(line.text)) is not None]
    tags = {stream: tag for stream, tag, _text in found}
    return frozenset(stream for stream, tag in tags.items() if tag == "P")


def log_before(path: str) -> tuple[Path, list[Line]] | None:
    """Return path and last lines of the previous log, or None if missing or unreadable."""
    before = _neighbour(path, -1)
    if before is None:
        return None
    with contextlib.suppress(OSError, InputError), open_log(str(before)) as stream:
        return before, list(deque(read_lines(stream), maxlen=_LINES))
    return None


def lines_behind(path: str) -> Iterator[Line]:
    """Yield the first lines of the next log, or nothing without one."""
    behind = _neighbour(path, 1)
    if behind is not None:
        with contextlib.suppress(OSError, InputError), open_log(str(behind)) as stream:
            for _, line in zip(range(_LINES), read_lines(stream), strict=False):
                yield line


def _neighbour(path: str, step: int) -> Path | None:
    """Return the container's previous (-1) or next (1) log, or None."""
    named_so = _named(path)
    if named_so is None:
        return None
    path, own = named_so
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError, ValueError):
        for other in sorted(
            Path(path).parent.iterdir()
        ):  # during compression both exist, and the compressed one counts
            named = _NAME.fullmatch(other.name)
            if named is not None and named["instance"] == own["instance"]:
                found[named["at"] or "now"] = other
    order = sorted(found)  # digits come before letters, so the current log is last
    if (own["at"] or "now") in order:
        at = order.index(own["at"] or "now") + step
    else:
        at = -1
    if 0 <= at < len(order):
        return found[order[at]]
    return None


def _named(path: str) -> tuple[str, re.Match[str]] | None:
    """Return a log's folder and its parsed name, or None if the kubelet did not name it."""
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
    """Return whether a log is a container runtime's by name and first line, without a listing."""
    if _named(path) is None:
        return False
    with contextlib.suppress(OSError, InputError), open_log(path) as stream:
        return piece(next((line.text for line in read_lines(stream)), "")) is not None
    return False
