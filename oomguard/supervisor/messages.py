"""Write the supervisor's own few lines to standard error, without ever failing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Final

_TO_PASTE: Final = "command"
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def event_line(event: str, fields: Mapping[str, object]) -> str:
    """Return an event as one line: the program, a sentence, then ``key=value`` for each field.

    A value with spaces is quoted. Fields without a value are left out. A command to paste is last
    and as it is.

        >>> event_line("retrying", {"rows": "64 -> 36", "attempt": 2})
        'oomguard: Retrying: rows="64 -> 36" attempt=2'
    """
    sentence = event.removesuffix(".")
    first = (sentence.split(None, 1) or [""])[0].rstrip(",;:.")
    # a name such as "vLLM" or "max_model_len" stays as it is
    if first.isalpha() and first.islower() and first != "oomguard":
        sentence = sentence[0].upper() + sentence[1:]
    line = f"oomguard: {sentence}"
    words = []
    for key, value in fields.items():
        if value is not None and key != _TO_PASTE:
            words.append(f"{key}={_quoted(value)}")
    if fields.get(_TO_PASTE) is not None:
        words.append(f"{_TO_PASTE}={fields[_TO_PASTE]}")
    if words:
        line = f"{line}: {' '.join(words)}"
    return line.replace("\n", "\\n")


def _quoted(value: object) -> str:
    text = str(value)
    if text and not set(text) & set(' \t\n"='):
        return text
    if '"' in text and "'" not in text:
        return f"'{text}'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
            line = event_line(event, fields)
        write_line(line)


def write_line(line: str) -> None:
    """Write a line to standard error, without characters that control a terminal."""
    # A control character in a file name or a value could drive the user's terminal.
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    try:
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return
