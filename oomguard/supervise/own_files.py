"""The files that oomguard itself writes while a command runs or after it: none of them is a side effect of the command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from oomguard.supervise.nesting import options_of_inner_runs
from oomguard.supervisor.open_files import Identity, identity

_OF_A_JOURNAL: Final = ("", "-journal", "-wal", "-shm")
_STANDARD: Final = (1, 2)
# The options of a run that name files which it writes.
_OPTIONS: Final = frozenset({"--journal", "--metrics", "--report", "--snapshot", "--termination-message"})


class OwnFiles:
    """The one list of them for a run. Whoever writes a file adds it here; where a name is given late, it is asked for late.

    Args:
        paths: those whose names are known; None is passed over.
        late: each returns some whose names are not known before they are written.
    """

    def __init__(self, *paths: Path | str | None, late: Iterable[Callable[[], Iterable[Path]]] = ()) -> None:
        self._named = list(late)
        known = [Path(path).absolute() for path in paths if path is not None]
        self.add(lambda: known)

    def add(self, named: Callable[[], Iterable[Path]]) -> None:
        """Add files; ``named`` is called each time that the list is asked for."""
        self._named.append(named)

    def identities(self) -> set[Identity]:
        """Return those that are there now, with the files that our own output goes to."""
        found: set[Identity] = set()
        for number in _STANDARD:
            with contextlib.suppress(OSError):
                found.add(identity(os.fstat(number)))
        for path in self._all_named():
            with contextlib.suppress(OSError):
                found.add(identity(path.stat()))
        return found

    def paths(self) -> tuple[str, ...]:
        """Return those that are there now by their names without links, as another process finds them."""
        found: set[str] = set()
        for path in (*(Path(f"/proc/self/fd/{number}") for number in _STANDARD), *self._all_named()):
            with contextlib.suppress(OSError):
                if path.is_file():
                    found.add(os.path.realpath(path))
        return tuple(sorted(found))

    def _all_named(self) -> Iterator[Path]:
        for named in self._named:
            yield from named()


def of_inner_runs(argv: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that the options of runs inside this one name: they write them as we do ours, and repeat nothing by it."""
    for words in options_of_inner_runs(argv):
        for name, value in _values(words):
            if "://" not in value:  # else it is a database
                yield from of_journal(Path(value)) if name == "--journal" else (Path(value),)


def _values(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for word, behind in zip(words, (*words[1:], ""), strict=True):
        name, is_joined, value = word.partition("=")
        if name in _OPTIONS:
            yield name, value if is_joined else behind


def of_journal(journal: Path | None) -> Iterator[Path]:
    """Yield the journal and what SQLite keeps beside it; nothing where no journal is kept."""
    if journal is not None:
        yield from (Path(f"{journal}{suffix}") for suffix in _OF_A_JOURNAL)
