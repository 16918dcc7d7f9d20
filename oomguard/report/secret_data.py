"""What secrets.toml says, read once and when the first text is masked."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.user_files import read_tables

_FILE: Final = Path(__file__).with_name("secrets.toml")


@dataclass(frozen=True, slots=True)
class Names:
    """The ends of names that say what a value is, as one pattern each where they are patterns."""

    strong: re.Pattern[str]
    about: re.Pattern[str]
    weak: frozenset[str]
    harmless: frozenset[str]
    plain: frozenset[str]


@dataclass(frozen=True, slots=True)
class Program:
    """The flags of one program that carry a secret.

    Attributes:
        after: the sub-command from which on they do, None: anywhere.
        glued: the secret is the rest of the word.
        next: it is the next word.
        next_token: it is the next word, where that looks like a token.
        pair: it is behind the first ``:`` or ``%`` of the rest of the word, or of the next one.
    """

    after: str | None
    glued: tuple[str, ...]
    next: frozenset[str]
    next_token: frozenset[str]
    pair: tuple[str, ...]


@functools.cache
def names() -> Names:
    """Return what the names of secrets look like."""
    table = _data()["names"]
    contains = "|".join(table["contains"])
    return Names(
        re.compile(rf"(?i)(?:.*(?:{'|'.join(table['strong'])})|.*(?:{contains}).*)\Z"),
        re.compile(rf"(?i)(?:{'|'.join(table['about'])})\Z"),
        *(frozenset(table[name]) for name in ("weak", "harmless", "plain")),
    )


@functools.cache
def programs() -> dict[str, Program]:
    """Return the programs by name."""
    found: dict[str, Program] = {}
    for row in _data()["program"]:
        pair = (*row.get("glued_pair", ()), *row.get("next_pair", ()))
        program = Program(
            row.get("after"),
            tuple(row.get("glued", ())),
            frozenset(row.get("next", ())),
            frozenset(row.get("next_token", ())),
            pair,
        )
        found |= dict.fromkeys(row["names"], program)
    return found


@functools.cache
def interpreters() -> frozenset[str]:
    """Return the programs to whose ``-c`` a word is a program, without the version at the end of their names."""
    return frozenset(_data()["script"]["interpreters"])


@functools.cache
def token_rests() -> dict[str, str]:
    """Return what follows each prefix of a token, as a pattern."""
    return {prefix: row["rest"] for row in _data()["token"] for prefix in row["prefix"]}


@functools.cache
def parts() -> tuple[tuple[str, str], ...]:
    """Return what a text must hold, lower-cased, and the pattern that keeps its first group and hides the rest then."""
    return tuple((row["needs"], row["pattern"]) for row in _data()["part"])


@functools.cache
def _data() -> dict[str, Any]:
    return next(iter(read_tables("secrets", [_FILE]).values()))
