"""Which files count as results of a command: not its caches, logs and temporary files, wherever it has them."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from oomguard.engines.effects import engine_effects
from oomguard.user_files import read_tables

# What parts the words of a shell's or Python's line that is one argument (``sh -c``, ``python -c``).
_BETWEEN_WORDS: Final = re.compile(r"[\s'\"<>|&;=,(){}\[\]]+")
_MOST_NAMES: Final = 1000
_VARIABLE: Final = re.compile(r"\$(\w+)(/.*)?\Z")


class Places:
    """The folders and names that decide about a file, for one command.

    Args:
        argv: the command; files and folders that it names count.
        env: the variables it was started with.
        folder: its working folder, None where that was removed.

    Attributes:
        folder: the same, without links.
        named: the files and folders that the command names and that are there, but those that the working folder or a home lies in.
        shared: folders whose own folders belong to anybody.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
        data = _data()
        self.folder = None if folder is None else os.path.realpath(folder)
        self._names = re.compile("|".join(map(fnmatch.translate, data["names"])))
        self._by_others = re.compile("|".join(map(fnmatch.translate, data["changed_by_others"])))
        kept = (*data["caches"], *engine_effects().caches, *data["temporary"])
        self._never = {os.path.join(self.folder or "/", path) for path in _expanded(kept, env)}
        named: dict[str, bool] = {}
        for path, is_kept in _named(argv, self.folder, frozenset(data["flags"])):
            named[path] = named.get(path, False) or is_kept
        self._never |= {path for path, is_kept in named.items() if is_kept}
        self._never = {os.path.realpath(path) for path in self._never} - {"/"}
        # "/", "..", a home: not where results go, and what changes there may be anybody's.
        home = os.path.realpath(_home(env))
        self.shared = frozenset({"/", home})
        around = f"{self.folder or ''}/", f"{home}/"
        wide = {path for path in named if any(folder.startswith(f"{path.rstrip('/')}/") for folder in around)}
        self.named = tuple(path for path, is_kept in named.items() if not is_kept and path not in wide)
        self._always = {*self.named, *([] if self.folder is None else [self.folder])}

    def counts(self, path: str) -> bool:
        """Return whether a file that was written may hold results; ``path`` is absolute and has no links."""
        above = [path]
        while above[-1] != "/":
            above.append(os.path.dirname(above[-1]))
        always = next((folder for folder in above if folder in self._always), "")
        never = next((folder for folder in above if folder in self._never), "")
        if len(never) > len(always) or (never and never == always and os.path.dirname(path) != never):
            return False
        below = os.path.basename(path) if path == always else os.path.relpath(path, always or "/")
        return not any(self._names.match(part) for part in below.split("/"))

    def may_be_changed_by_others(self, path: str) -> bool:
        """Return whether people and their tools change such a file while a command runs: sources, hidden files."""
        return bool(self._by_others.match(os.path.basename(path)))


def _named(argv: Sequence[str], folder: str | None, kept_flags: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Yield the paths that a command names, and whether the flag before says that they are kept for nothing but speed."""
    flag, looked = "", 0
    for word in argv:
        for part in (word, *_BETWEEN_WORDS.split(word)):
            if part.startswith("-"):
                flag = part.partition("=")[0]
            elif part:
                looked += 1
                path = os.path.join(folder or "/", os.path.expanduser(part)) if looked <= _MOST_NAMES else ""
                if path and "\0" not in path and os.path.exists(path):
                    yield os.path.realpath(path), bool(kept_flags & set(re.split("[-_]", flag.lower())))
                if part == word:
                    flag = ""


def _expanded(folders: Iterable[str], env: Mapping[str, str]) -> Iterator[str]:
    home = _home(env)
    for folder in folders:
        variable = _VARIABLE.match(folder)
        if variable is None:
            yield home + folder[1:] if folder.startswith("~") else folder
        elif env.get(variable[1]):
            yield env[variable[1]] + (variable[2] or "")


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")


def _data() -> dict[str, Any]:
    return next(iter(read_tables("no_effects", [Path(__file__).with_name("no_effects.toml")]).values()))
