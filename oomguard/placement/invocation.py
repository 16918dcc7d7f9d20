"""The ``oomguard run`` that was asked for, as a line to paste: over other devices, with a wait, of a changed command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of ``oomguard run``.

    Attributes:
        gpus: what ``--gpus`` asks for, wherever it was given.
        command: the user's own, masked, quoted for a shell.
        options: the words before ``--``.
    """

    gpus: str
    command: str
    options: tuple[str, ...] = ()

    def line(self, *, gpus: str | None = None, command: str | None = None, wait: str | None = None) -> str:
        """Return it to paste, with all its other options; what is None stays as it is."""
        words = _with_value(self.options, "--gpus", self.gpus if gpus is None else gpus)
        if wait is not None:
            words = _with_value(words, "--wait", wait, behind="--gpus")
        return f"{shlex.join(['oomguard', 'run', *words])} -- {self.command if command is None else command}"


def _with_value(words: Sequence[str], name: str, value: str, *, behind: str | None = None) -> tuple[str, ...]:
    """Return options with one value of an option, at the place of the first that it had, else first of all or behind another one."""
    kept: list[str] = []
    at: int | None = None
    left = iter(words)
    for word in left:
        if word == name or word.startswith(f"{name}="):
            at = len(kept) if at is None else at
            if word == name:
                next(left, None)
        else:
            kept.append(word)
    if at is None:
        at = next(_ends(kept, behind), 0)
    return (*kept[:at], name, value, *kept[at:])


def _ends(words: Sequence[str], name: str | None) -> Iterator[int]:
    return (i + 2 for i, word in enumerate(words) if word == name)
