"""A pattern made ready on first use: a short log needs a few dozen of the shipped patterns, and compiling one takes a millisecond.

Only shipped patterns wait, and a test checks all of them; a user's pattern is compiled and checked at load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomguard.rules.kept_patterns import KeptPatterns


@functools.cache
def _kept() -> KeptPatterns:
    from oomguard.rules.kept_patterns import KeptPatterns

    return KeptPatterns()


class LazyPattern:
    """What the scanner uses of a compiled pattern."""

    __slots__ = ("_compiled", "pattern")

    def __init__(
        self, text: str, *, path: str, key: str
    ) -> None:  # as ``compile_pattern`` takes them, for its messages
        self.pattern = text
        self._compiled: Any = None

    @property
    def compiled(self) -> Any:
        """The compiled pattern."""
        if self._compiled is None:
            self._compiled = _kept().compiled(self.pattern)
        return self._compiled

    @property
    def groupindex(self) -> dict[str, int]:
        """Named groups and their numbers."""
        return dict(self.compiled.groupindex)

    def search(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first match, None if there is no match; the arguments are those of ``Pattern.search``."""
        return self.compiled.search(*args, **kwargs)

    def finditer(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return all matches; the arguments are those of ``Pattern.finditer``."""
        matches: Iterator[Any] = self.compiled.finditer(*args, **kwargs)
        return matches
