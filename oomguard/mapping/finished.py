"""Where the results of items are in the store.

A call stores results in the order of its items, so those of the next items are most likely the next in the store: read in their order
they cost a quarter of what looking each one up costs, which is what is left where the order is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from oomguard.mapping.store import Key, Store

# So many results are read ahead, by the items that are asked for: several workers store their batches in turn.
_AHEAD_RATIO: Final = 4
# And so many at least: of a generator, a few items are asked for at a time.
_LEAST_AHEAD: Final = 800
# Where fewer than this share are among them, the order is another one.
_LEAST_RATIO: Final = 0.5


class Finished:
    """The results that a computation has in the store.

    Args:
        store: the store.
        computation: the number of the computation.
        count: how many results there were when the call began; those that come later are found when an item is claimed.
    """

    def __init__(self, store: Store, computation: int, count: int) -> None:
        self._store, self._computation, self._left = store, computation, count
        self._is_in_order, self._last_row = count > 0, 0
        self._ahead: dict[Key, int] = {}

    def rows(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the rows of those results that are there."""
        if not self._left and not self._ahead:
            return {}
        found: dict[Key, int] = {}
        if self._is_in_order:
            self._read_ahead(_AHEAD_RATIO * len(keys))
            pop = self._ahead.pop
            found = {key: row for key in keys if (row := pop(key, 0))}
            self._is_in_order = len(found) >= _LEAST_RATIO * len(keys)
        missing = [key for key in keys if key not in found]
        return found | self._store.find(self._computation, missing) if missing else found

    def _read_ahead(self, wanted: int) -> None:
        if self._left and len(self._ahead) < wanted:
            new = self._store.after(self._computation, self._last_row, max(wanted, _LEAST_AHEAD))
            self._ahead.update(((item, occurrence), row) for row, item, occurrence in new)
            self._left = max(0, self._left - len(new)) if new else 0
            self._last_row = new[-1][0] if new else self._last_row
