"""The diagnosis log: one structured event per line, through structlog where the program configured
it.

The library never configures structlog, and loads it for nobody: if the program has not configured
it, events go through the standard library's logger ``oomguard`` (warnings on standard error by
default). The command line writes its events itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

Write = Callable[[int, str, dict[str, Any]], None]
# Entered around each event while something on the terminal would be written into, as the bar of a
# map is; the newest counts.
pauses: Final[list[Callable[[], AbstractContextManager[object]]]] = []
_writer: list[Write] = []
_least: list[int] = []


class _Written:
    """A logger as structlog's, whose events go to one function: level, event, fields."""

    def __init__(self, write: Write, least: int) -> None:
        self._write = write
        self._least = least

    # as structlog and the standard library have it
    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        return level >= self._least

    def _tell(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            self._write(level, event, fields)

    def debug(self, event: str, **fields: Any) -> None:
        self._tell(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._tell(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._tell(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._tell(logging.ERROR, event, fields)


class _Pausing:
    """A logger that enters a pause around each event."""

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
    """Have all events of this process from this level on written by one function; for the command
    line only.
    """
    _writer[:], _least[:] = [write], [least]


def get_logger() -> Any:
    """A bound structlog logger; look it up when an event happens, so that a later configuration
    counts.
    """
    if pauses:
        return _Pausing(_logger(), pauses[-1])
    return _logger()


def get_plain_logger() -> Any:
    """The standard library's logger, for what is told with a traceback and where structlog is not
    to be loaded.
    """
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
        lambda level, event, fields: logger.log(level, "%s", _line(event, fields)),
        logger.getEffectiveLevel(),
    )


def _line(event: str, fields: dict[str, Any]) -> str:
    """Return an event as one line to read: whose, what, and each field."""
    shown = ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
    if shown:
        return f"oomguard: {event}: {shown}"
    return f"oomguard: {event}"
