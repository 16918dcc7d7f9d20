"""The processor time that the patterns of one input may take: a limit for each search, and one for all of them together.

Counted is the searching thread's processor time, so that a loaded machine leaves out nothing that an idle one finds.
"""

from __future__ import annotations

import time
from typing import Any, Final

SEARCH_TIMEOUT_S: Final = 0.5
# What a search may take without counting: a shipped pattern takes well below a millisecond on a line of usual length.
FREE_S: Final = 0.02
# Beyond that all searches of one input share so much; then each has no more than the free part, and is left out above it.
SHARED_S: Final = 5.0


class SearchTime:
    """What the searches of one input have taken so far."""

    def __init__(self) -> None:
        self._beyond_s = 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell where the shared time is gone, so that a slow pattern is left out at its first search."""
        if self._beyond_s < SHARED_S:
            return ()
        limit_ms = FREE_S * 1000
        return (f"slow patterns took {SHARED_S:g} s together: from then on each was left out after {limit_ms:g} ms",)

    def search(self, pattern: Any, text: str, **span: int) -> Any:
        """Return the first match, or None.

        Args:
            pattern: a pattern of a signature; one that is compiled on first use is compiled before its time counts.
            text: what is searched.
            span: ``pos`` and ``endpos``, as of ``Pattern.search``.

        Raises:
            TimeoutError: the search takes longer than it may.
        """
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            return compiled.search(text, timeout=self._limit_s, **span)
        finally:
            self._count(began)

    def first_behind(self, pattern: Any, text: str, position: int) -> Any:
        """Return the first match that ends behind a position, or None; raise as ``search`` does."""
        compiled = getattr(pattern, "compiled", pattern)
        began = time.thread_time()
        try:
            return next((m for m in compiled.finditer(text, timeout=self._limit_s) if m.end() > position), None)
        finally:
            self._count(began)

    @property
    def _limit_s(self) -> float:
        return min(SEARCH_TIMEOUT_S, FREE_S + max(0.0, SHARED_S - self._beyond_s))

    def _count(self, began: float) -> None:
        self._beyond_s += max(0.0, time.thread_time() - began - FREE_S)
