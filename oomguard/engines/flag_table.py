"""Read all server flags of an engine, of any version, from engines/<engine>/flags.toml."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from oomguard.core.files import read_tables

_LONG: Final = "--"
_SHORT_CHARS: Final = 2
_OFF: Final = "no-"


@dataclass(frozen=True, slots=True)
class AllFlags:
    """Flags by their long names without dashes.

    Attributes:
        alone: switches without a value.
        perhaps: flags with an optional value.
        one: flags with one value.
        many: flags that take all words up to the next flag.
        short: short forms, each with its long name.
        takes_memory: flags that no plan counts but that change memory use, each with the reason.
        means: flags that set several settings, each with these settings.
    """

    alone: frozenset[str]
    perhaps: frozenset[str]
    one: frozenset[str]
    many: frozenset[str]
    short: Mapping[str, str]
    takes_memory: Mapping[str, str]
    means: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> frozenset[str]:
        """All names, without the ``no-`` forms."""
        return self.alone | self.perhaps | self.one | self.many

    def name_of(self, word: str) -> str | None:
        """Return the name of a flag, with ``no-`` if it switches off; None if no version has it.

        Like the engine's parser: underscores count as dashes, ``FLAG.KEY`` is a key of the flag's
        object, and a unique prefix is enough. After a short flag the value may follow directly.
        """
        flag = word.partition("=")[0]
        if not flag.startswith(_LONG):
            return self.short.get(flag.partition(".")[0]) or self.short.get(flag[:_SHORT_CHARS])
        name = flag.removeprefix(_LONG).partition(".")[0].replace("_", "-")
        if not name or self._is_flag(name):
            return name or None
        switches = (_OFF + switch for switch in self.alone)
        begun = [known for known in (*self.names, *switches) if known.startswith(name)]
        if len(begun) == 1:
            return begun[0]
        return None

    def end_of(self, words: Sequence[str], at: int, name: str) -> int:
        """Return the index after the last value of the flag at ``at``."""
        flag = words[at].partition(".")[0]
        holds = "=" in flag or not (flag.startswith(_LONG) or flag in self.short)  # -O3
        if holds or "=" in words[at] or name.removeprefix(_OFF) in self.alone:
            return at + 1
        end = at + 1
        while (
            end < len(words)
            and not words[end].startswith(_LONG)
            and (end == at + 1 or name in self.many)
        ):
            end += 1
        return end

    def _is_flag(self, name: str) -> bool:
        return name in self.names or name.removeprefix(_OFF) in self.alone


@functools.cache
def all_flags(engine: str) -> AllFlags:
    """Return the flags of an engine that has a flags.toml."""
    file = Path(__file__).parent / engine / "flags.toml"
    (table,) = read_tables("all_flags", [file]).values()
    alone, perhaps, one, many = (
        frozenset(table[kind]) for kind in ("alone", "perhaps", "one", "many")
    )
    return AllFlags(
        alone, perhaps, one, many, table["short"], table["takes_memory"], table["means"]
    )
