"""Find the command that started the engine, if the log shows it, and change a flag of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from oomguard.core.facts import FactValue
from oomguard.scan.skim import Gap
from oomguard.scan.source import Line

# A shell's prompt, or the mark of `set -x`, before the command.
_PROMPT: Final = re.compile(r"(?:\S{0,60}[$#] |\+ )?(?=[\w./~])")
_FLAG: Final = " --"
_MOST_CHARS: Final = 4000


class ShownCommand:
    """Watch the lines of a log for the last command that starts an engine.

    Attributes:
        text: the command; "" if no line shows one.
    """

    def __init__(self) -> None:
        self.text = ""

    def watch(self, lines: Iterable[Line | Gap]) -> Iterator[Line | Gap]:
        """Yield the lines as they are."""
        for line in lines:
            if isinstance(line, Line) and _FLAG in line.text:
                self._read(line.text)
            yield line

    def _read(self, text: str) -> None:
        prompt = _PROMPT.match(text)
        if prompt is None or len(text) > _MOST_CHARS:
            return
        from oomguard.engines.registry import launchers  # loads engines' tables

        command = text[prompt.end() :].strip()
        words = _words(command)
        if words and any(engine.is_own_command(words) for engine in launchers()):
            self.text = command


def changed_command(
    command: str, settings: Mapping[str, FactValue], engine: str, version: str | None
) -> str | None:
    """Return a command with other values of some settings; None if it cannot be changed.

    Args:
        command: a line for a shell.
        settings: the new values by canonical name.
        engine: the engine's name.
        version: its version; None if unknown.
    """
    from oomguard.engines.command import Launch, with_flag

    words = _words(command)
    if not words:
        return None
    launch = Launch(words, engine_version=version)
    try:
        for name, value in settings.items():
            launch = with_flag(launch, name, value, engine)
    except KeyError:
        return None
    return shlex.join(launch.argv)


def _words(command: str) -> tuple[str, ...]:
    """Return a command's words; empty for a line that a shell would read as more than one."""
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        return ()
    if any(set(word) & set("|;&<>") for word in words) or command.endswith("\\"):
        return ()
    return words
