"""A pattern compiled on first use: a short log needs a dozen of the shipped patterns, and each takes a millisecond.

Only shipped files are read so, which a test compiles whole; a user's pattern is compiled and checked when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomguard.rules.pattern import compile_pattern


class LazyPattern:
    """Looks like a compiled pattern, as far as the scanner uses one."""

    __slots__ = ("_compiled", "_key", "_path", "pattern")

    def __init__(self, text: str, *, path: str, key: str) -> None:
        self.pattern = text
        self._path, self._key = path, key
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        """The pattern itself; raises RuleError where it is none."""
        if self._compiled is None:
            self._compiled = compile_pattern(self.pattern, path=self._path, key=self._key)
        return self._compiled

    @property
    def groupindex(self) -> dict[str, int]:
        """Named groups and their numbers."""
        return dict(self.compiled.groupindex)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """The first match."""
        return self.compiled.search(*args, **kwargs)

    def finditer(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """All matches."""
        matches: Iterator[Any] = self.compiled.finditer(*args, **kwargs)
        return matches
