"""Write the diagnosis log: one structured event per line.

The library never configures or imports structlog. If the program has configured structlog, events
go there; otherwise they go to the standard logger ``oomguard`` (warnings on standard error by
default). The command line installs its own writer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from oomguard.supervisor.messages import event_line

# A warning that is repeated at once, word for word, is written once.
_REPEATED_S: Final = 60.0
Write = Callable[[int, str, dict[str, Any]], None]
# Context managers entered around each event, so that an event does not break a progress bar on the
# terminal. Only the newest one is used.
pauses: Final[list[Callable[[], AbstractContextManager[object]]]] = []
_writer: list[Write] = []
_least: list[int] = []
# The last event and when it was written.
_last: list[tuple[tuple[int, str, str], float]] = []


class _Written:
    """Imitate a structlog logger and pass each event to one function."""

    def __init__(self, write: Write, least: int) -> None:
        self._write = write
        self._least = least

    # the name that structlog and the standard library use
    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return level >= self._least

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            self._write(level, event, fields)

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)


def _is_repeated(level: int, event: str, fields: dict[str, Any]) -> bool:
    """Return whether the last event was the same warning, a short time ago."""
    now = time.monotonic()
    this = (level, event, str(fields))
    is_same = bool(_last) and _last[0][0] == this and now - _last[0][1] < _REPEATED_S
    _last[:] = [(this, now)]
    return is_same and level >= logging.WARNING


class _Pausing:
    """Enter a context manager around each event of another logger."""

    def __init__(self, logger: Any, pause: Callable[[], AbstractContextManager[object]]) -> None:
        self._logger = logger
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        write = getattr(self._logger, name)
        if name not in {"debug", "info", "warning", "error", "exception"}:
            return write

        def paused(event: str, *args: Any, **fields: Any) -> None:
            with self._pause():
                write(event, *args, **fields)

        return paused


def write_events(write: Write, least: int) -> None:
    """Send all events of this process from a level on to one function (command line only).

    A warning that is the same as the event before it is left out.

    Args:
        write: receives the level, the event and its fields.
        least: the lowest level to write, as in ``logging``.
    """

    def write_once(level: int, event: str, fields: dict[str, Any]) -> None:
        if not _is_repeated(level, event, fields):
            write(level, event, fields)

    _writer[:], _least[:] = [write_once], [least]


def get_logger() -> Any:
    """Return the logger for structured events.

    Call this for every event, so that a later configuration of structlog takes effect.

        >>> get_logger().warning("could not read NVML", error="Driver Not Loaded")
    """
    if pauses:
        return _Pausing(_logger(), pauses[-1])
    return _logger()


def get_plain_logger() -> Any:
    """Return the standard logger, for tracebacks and for code that must not load structlog."""
    logger = logging.getLogger("oomguard")
    if pauses:
        return _Pausing(logger, pauses[-1])
    return logger


def _logger() -> Any:
    if _writer:
        return _Written(_writer[0], _least[0] if _least else logging.DEBUG)
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        return structlog.get_logger("oomguard")
    logger = logging.getLogger("oomguard")
    return _Written(
        lambda level, event, fields: logger.log(level, "%s", event_line(event, fields)),
        logger.getEffectiveLevel(),
    )
