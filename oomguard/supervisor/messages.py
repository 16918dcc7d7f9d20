"""Write the supervisor's own few lines to standard error, without ever failing."""

from __future__ import annotations

import os
import time
from typing import Final

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Messages:
    """Write events in the format of ``oomguard run``.

    Args:
        quiet: whether to show only errors.
        is_json: whether each event is one line of JSON.
    """

    def __init__(self, *, quiet: bool = False, is_json: bool = False) -> None:
        self.quiet = quiet
        self.is_json = is_json

    def say(self, level: str, event: str, **fields: object) -> None:
        """Write one event."""
        if self.quiet and LEVELS[level] < LEVELS["error"]:
            return
        if self.is_json:
            import json

            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = json.dumps(
                {**fields, "event": event, "level": level, "logger": "oomguard", "timestamp": now}
            )
        else:
            extra = " ".join(f"{key}={value}" for key, value in fields.items())
            if extra:
                line = f"oomguard: {event}: {extra}"
            else:
                line = f"oomguard: {event}"
        write_line(line)


def write_line(line: str) -> None:
    """Write a line to standard error, without characters that control a terminal."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    try:
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return
