"""Read each item of a call of ``map`` once, identify it, and find its result in the store."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.records import Record
from oomguard.guarding.failure import add_note
from oomguard.mapping.computation import DIGEST_BYTES, UnknownContentError, digest
from oomguard.mapping.store import FinishedResults, Key

# Items that are looked up together. From a generator, ``map`` reads only the next batch.
READ_AT_ONCE: Final = 800
WAITING = 0
FAILED = -1
_KEY_HINT: Final = "let key= return a text, a number, or a tuple of them"


@dataclass(frozen=True, slots=True, repr=False)
class FailedItem(Record):
    """Describe an item without a result; the next call of ``map`` tries it again.

    ```python
    for item in results.failed:
        print(item.index, item.error)
    ```

    Attributes:
        index: its position among the items.
        key: its key from ``key=``, or the digest of its content.
        error: the type and message of the exception, and the diagnosis if memory ran out.
        never_fits: whether it ran out of memory even alone.
    """

    index: int
    key: str
    error: str
    never_fits: bool


class Items:
    """Hold every item that was read, by its index.

    Attributes:
        rows: the row of each result in the store; ``WAITING`` without one so far, ``FAILED`` for an
            item that failed.
        total: the number of items, or None for a generator.
        settled: the number of finished and failed items.
        stopped_by: the error of reading the next item, which the next read raises; or None.

    Args:
        items: the user's items. An iterator is read only as far as necessary.
        key: returns the key of an item. None: use its content.
        finished: the results of earlier calls.
    """

    def __init__(
        self, items: Iterable[Any], key: Callable[[Any], Any] | None, finished: FinishedResults
    ) -> None:
        _check(items)
        if key is not None and not callable(key):
            hint = f"give a function: key=lambda item: item[{key!r}]"
            raise UsageError(f"key must be a function, got a {type(key).__name__}", hint=hint)
        self._source = items if _is_indexed(items) else None
        self.total: int | None = operator.length_hint(items, -1)
        if self.total < 0:
            self.total = None
        self._iterator = _iterate(items)
        self._key = key
        self._finished = finished
        self.rows = array("q")
        self._digests = bytearray()
        self._held: dict[int, Any] = {}
        self._occurrences: dict[int, int] = {}
        self._seen: set[bytes] = set()
        self._seen_again: dict[bytes, int] = {}
        self.all_read = False
        self.stopped_by: Exception | None = None
        self.settled = 0

    def __getitem__(self, index: int) -> Any:
        return self._held[index] if self._source is None else self._source[index]  # type: ignore[index]

    @property
    def is_indexed(self) -> bool:
        """Whether all items are available before the first is computed.

        A mistake in the last one is then reported first.
        """
        return self._source is not None

    def read(self, most: int = READ_AT_ONCE) -> bool:
        """Read up to ``most`` further items and look them up; return whether one has no result.

        Raises:
            UsageError: the content of an item is unknown, or two items have the same key.
        """
        start = len(self.rows)
        new = self._take(most)
        self.all_read = len(new) < most and self.stopped_by is None
        keys = [self._identify(start + place, item) for place, item in enumerate(new)]
        found = self._finished.rows(keys)
        self.rows.extend([found.get(key, WAITING) for key in keys])
        self.settled += len(found)
        self._digests += b"".join(key[0] for key in keys)
        if self._source is None:
            for place, item in enumerate(new):
                if keys[place] not in found:
                    self._held[start + place] = item
        if self.all_read:
            self.total = len(self.rows)
            self._seen.clear()
            self._seen_again.clear()
        return len(found) < len(new)

    def _take(self, most: int) -> list[Any]:
        """Take the next items; if reading fails, earlier items are computed first."""
        if self.stopped_by is not None:
            raise self.stopped_by
        new: list[Any] = []
        try:
            new.extend(islice(self._iterator, most))
        except Exception as error:
            if not new or self._source is not None:
                raise
            self.stopped_by = error
        return new

    def key_of(self, index: int) -> Key:
        """Return the key of an item in the store."""
        at = index * DIGEST_BYTES
        return bytes(self._digests[at : at + DIGEST_BYTES]), self._occurrences.get(index, 0)

    def shown_key(self, index: int) -> str:
        """Return an item's key for messages.

        It is the key from ``key``, or the digest; a repeated digest gets a number.
        """
        if self._key is not None and (self._source is not None or index in self._held):
            return str(self._key(self[index]))
        item, occurrence = self.key_of(index)
        return item.hex() + (f"#{occurrence + 1}" if occurrence else "")

    def settle(self, index: int, row: int) -> None:
        """Record the row of an item's result, or its failure, and release the item."""
        self.rows[index] = row
        self.settled += 1
        self._held.pop(index, None)

    def _identify(self, index: int, item: Any) -> Key:
        try:
            known = digest(item if self._key is None else self._key_given(index, item))
        except UnknownContentError as error:
            raise _unidentified(index, error, has_key=self._key is not None) from None
        if known not in self._seen:
            self._seen.add(known)
            return known, 0
        if self._key is not None:
            raise self._same_key(index, item)
        occurrence = self._occurrences[index] = self._seen_again[known] = (
            self._seen_again.get(known, 0) + 1
        )
        return known, occurrence

    def _key_given(self, index: int, item: Any) -> Any:
        assert self._key is not None  # noqa: S101 - asked for keys only
        try:
            key = self._key(item)
        except Exception as error:
            add_note(error, f"oomguard: key= raised this for items[{index}]")
            raise
        if key is None or isinstance(key, (list, dict)):
            if key is None:
                shown = "None"
            else:
                shown = f"a {type(key).__name__}"
            raise UsageError(f"the key of items[{index}] is {shown}", hint=_KEY_HINT)
        if isinstance(key, float) and math.isnan(key):
            raise UsageError(
                f"the key of items[{index}] is NaN, which does not equal itself",
                hint=_KEY_HINT,
            )
        return key

    def _same_key(self, index: int, item: Any) -> UsageError:
        assert self._key is not None  # noqa: S101 - asked for keys only
        key = self._key(item)
        before = None
        if self._source is not None:
            before = next((i for i in range(index) if self._key(self._source[i]) == key), None)  # type: ignore[index]
        if before is None:
            first = "an earlier item"
        else:
            first = f"items[{before}]"
        hint = (
            "give each item its own key, or leave out key=; equal items then have separate results"
        )
        return UsageError(f"items[{index}] has the same key as {first}: {key!r}", hint=hint)


def _unidentified(index: int, error: UnknownContentError, *, has_key: bool) -> UsageError:
    if has_key:
        return UsageError(
            f"the key of items[{index}] is a {error}, whose content oomguard cannot identify",
            hint=_KEY_HINT,
        )
    hint = "return the ID of an item: key=lambda item: item.id"
    return UsageError(
        f"items[{index}] is or contains a {error}, whose content oomguard cannot identify",
        hint=hint,
    )


def _check(items: Any) -> None:
    if isinstance(items, (str, bytes, Mapping)) or not (
        hasattr(items, "__iter__") or _is_indexed(items)
    ):
        hint = "give a list or another iterable: [text], list(table.items())"
        raise UsageError(f"items must not be a {type(items).__name__}", hint=hint)


def _iterate(items: Any) -> Iterator[Any]:
    """Yield the items, by index if they have no iterator."""
    if hasattr(items, "__iter__"):
        return iter(items)
    return (items[place] for place in range(len(items)))


def _is_indexed(items: Any) -> bool:
    """Return whether ``items[i]`` is the item at position ``i``; for a table it is a label."""
    return (
        hasattr(items, "__getitem__") and hasattr(items, "__len__") and not hasattr(items, "iloc")
    )
