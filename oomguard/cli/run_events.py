"""The events of ``oomguard run`` on standard error, one line each, as text or as JSON."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
from typing import Any, Final

# What is pasted into the user's own terminal: in quotes, a shell leaves ``~`` as it is.
_TO_PASTE: Final = frozenset({"command", "path", "remove"})


class Errors:
    """Standard error that cannot fail: the run goes on when nobody reads it any more."""

    encoding = getattr(sys.stderr, "encoding", "utf-8")

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return sys.stderr is not None and sys.stderr.isatty()

    def fileno(self) -> int:
        """Return the descriptor, for the terminal's width."""
        return 2


def configure_log(form: str, *, quiet: bool, verbose: bool) -> None:
    """Send events to standard error, one line each; only the command line does, never
    the library.
    """
    import logging

    from oomguard.core.log import write_events

    if quiet:
        least = logging.ERROR
    elif verbose:
        least = logging.DEBUG
    else:
        least = logging.INFO
    line = _json_line if form == "json" else _console_line
    errors = Errors()

    def write(level: int, event: str, fields: dict[str, Any]) -> None:
        from oomguard.report.presentable import drawn
        from oomguard.report.redact import homes_kept

        shown = {}
        for key, value in fields.items():
            with homes_kept() if key in _TO_PASTE else contextlib.nullcontext():
                if isinstance(value, str):
                    shown[key] = drawn(value)
                else:
                    shown[key] = value
        errors.write(f"{line(logging.getLevelName(level).lower(), event, shown)}\n")
        errors.flush()

    write_events(write, least)
    threading.excepthook = _tell_of_thread


def _tell_of_thread(failed: threading.ExceptHookArgs) -> None:
    """Tell in one line that a thread of our own failed: standard error is the command's, and no
    place for a traceback of ours.
    """
    from oomguard.core.log import get_logger

    if failed.thread is None:
        name = ""
    else:
        name = failed.thread.name
    reason = f"{failed.exc_type.__name__}: {failed.exc_value}"
    get_logger().warning(
        "a part of oomguard failed: the run goes on without", part=name, reason=reason
    )


def _console_line(_level: str, event: str, fields: dict[str, Any]) -> str:
    extra = " ".join(f"{key}={value}" for key, value in fields.items()).replace(
        "\n", "\\n"
    )  # one line each
    return f"oomguard: {event}" + (f": {extra}" if extra else "")


def _json_line(level: str, event: str, fields: dict[str, Any]) -> str:
    from oomguard.report.json import json_line

    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    return json_line(
        {**fields, "event": event, "level": level, "logger": "oomguard", "timestamp": now}
    )
