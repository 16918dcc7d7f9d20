"""What ``map`` returns: results in the order of the items, read from the store when they are asked
for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, overload

from oomguard.core.errors import StoreError
from oomguard.mapping.items import FAILED, FailedItem
from oomguard.mapping.serialization import Codec
from oomguard.mapping.store import Store
from oomguard.mapping.work import Work

R = TypeVar("R")
_READ_AT_ONCE: Final = 64


class Reader:
    """Reads results by their rows in the store, which it opens at the first one."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self._path = path
        self._codec = codec
        self._store: Store | None = None
        self._lock = threading.Lock()

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Return the results of rows, in their order.

        Raises:
            StoreError: one cannot be read.
        """
        with self._lock:
            if self._store is None:
                self._store = Store(self._path)
                weakref.finalize(self, self._store.close)
            stored = self._store.values(rows)
        return [self._decoded(row, *stored[row]) for row in rows]

    def close(self) -> None:
        """Close the store; another read opens it again."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _decoded(self, row: int, form: str, content: bytes) -> Any:
        try:
            return self._codec.read(form, content)
        except (ValueError, KeyError, IndexError, RecursionError) as error:
            hint = (
                "give the decode= that belongs to the encode= it was stored with, or delete the row"
            )
            message = f"{self._path}: result {row} cannot be read: {type(error).__name__}: {error}"
            raise StoreError(message, hint=hint) from error


class Results(Sequence["R | FailedItem"], Generic[R]):
    """The results of a ``map``, in the order of its items: a sequence that holds none of them, and
    reads each from the store.

    In the place of an item that failed stands its ``FailedItem``, as
    ``asyncio.gather(return_exceptions=True)`` has exceptions.

    Attributes:
        failed: those items, in order.
        computed: how many items this call computed.
        reused: how many were in the store, from earlier calls or from other workers.
        other_results: how many results of other computations the store has.
        attempts: the attempts at each call of ``fn`` that ran out of memory at first, the last
            1,000.
    """

    def __init__(self, reader: Reader, work: Work, other_results: int) -> None:
        self._reader = reader
        self._rows = work.items.rows
        self._failed = work.failed
        self.failed = tuple(work.failed[index] for index in sorted(work.failed))
        self.computed = work.computed
        self.other_results = other_results
        self.attempts = tuple(work.attempts)
        self.reused = len(self._rows) - self.computed - len(self.failed)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> R | FailedItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[R | FailedItem]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._read(range(*index.indices(len(self))))
        try:
            place = range(len(self))[index]
        except IndexError:
            raise IndexError(f"there is no result {index}: there are {len(self)}") from None
        return self._read([place])[0]

    def __iter__(self) -> Iterator[R | FailedItem]:
        indices = iter(range(len(self)))
        while part := list(islice(indices, _READ_AT_ONCE)):
            yield from self._read(part)

    def __repr__(self) -> str:
        return (
            f"<Results of {len(self)} items: {self.computed} computed, {self.reused} reused, "
            f"{len(self.failed)} failed>"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "Results are read from an open store and cannot be pickled or copied: take "
            "list(results)"
        )

    def _read(self, indices: Sequence[int]) -> list[Any]:
        read = iter(
            self._reader.read(
                [self._rows[index] for index in indices if self._rows[index] != FAILED]
            )
        )
        return [
            self._failed[index] if self._rows[index] == FAILED else next(read) for index in indices
        ]
