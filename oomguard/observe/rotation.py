"""The logs of one container before and behind one that was rotated: a line that was cut between two of them is told where it began.

The kubelet renames ``0.log`` to ``0.log.20251125-051410`` when it is full, packs it with the next rotation (``.gz``), and the runtime
goes on in a new ``0.log`` (kubernetes pkg/kubelet/logs/container_log_manager.go, 1.34). Logs behind a URL are read alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from oomguard.errors import InputError
from oomguard.observe.pieces import piece
from oomguard.observe.source import Line, open_log, read_lines

_NAME: Final = re.compile(r"(?P<instance>\d+\.log)(?:\.(?P<at>\d{8}-\d{6})(?:\.gz)?)?")
# What a stream has printed last stands within so many lines of the end, and goes on within so many of the next log.
_LINES: Final = 4096


def begun_before(path: str) -> frozenset[str]:
    """Return the streams whose line, at the beginning of this log, began in the one before it."""
    before = log_before(path) if _begins_with_piece(path) else None
    found = [] if before is None else [told for line in before[1] if (told := piece(line.text)) is not None]
    tags = {stream: tag for stream, tag, _text in found}
    return frozenset(stream for stream, tag in tags.items() if tag == "P")


def log_before(path: str) -> tuple[Path, list[Line]] | None:
    """Return path and last lines of the log before this one; None where there is no such log, or it cannot be read."""
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
    """Return the log of the same container that was written just before (-1) or after (1) this one."""
    named_so = _named(path)
    if named_so is None:
        return None
    path, own = named_so
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError, ValueError):
        for other in sorted(Path(path).parent.iterdir()):  # a log being packed is there twice: the packed one counts
            named = _NAME.fullmatch(other.name)
            if named is not None and named["instance"] == own["instance"]:
                found[named["at"] or "now"] = other
    order = sorted(found)  # digits come before letters: what is written now is the last
    at = order.index(own["at"] or "now") + step if (own["at"] or "now") in order else -1
    return found[order[at]] if 0 <= at < len(order) else None


def _named(path: str) -> tuple[str, re.Match[str]] | None:
    """Return where a log lies, and what its name says of its rotation; None of a name that no kubelet gives."""
    if "://" in path or ".log" not in path:
        return None
    with contextlib.suppress(OSError, ValueError):
        if os.path.islink(path):  # noqa: PTH114 - takes any name; as in /var/log/containers
            path = os.path.realpath(path)
    own = _NAME.fullmatch(Path(path).name)
    return None if own is None else (path, own)


def _begins_with_piece(path: str) -> bool:
    """Return whether a log is a container runtime's, told by name and first line: no folder of thousands is listed."""
    if _named(path) is None:
        return False
    with contextlib.suppress(OSError, InputError), open_log(path) as stream:
        return piece(next((line.text for line in read_lines(stream)), "")) is not None
    return False
