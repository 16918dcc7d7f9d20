"""Do the work of ``map``: run each batch under the guard, and store it before the next one."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Generic, Literal, TypeVar, overload

from oomguard.core.errors import OomguardError, StoreError, UsageError
from oomguard.core.incident import Attempt
from oomguard.core.log import get_logger, pauses
from oomguard.core.process import disabled
from oomguard.guarding.failure import add_note, clear, is_out_of_memory, run_guarded
from oomguard.guarding.guard import guard, state_of
from oomguard.mapping.claims import Claims
from oomguard.mapping.items import FAILED, WAITING, FailedItem, Items
from oomguard.mapping.serialization import Codec
from oomguard.mapping.store import ASKED_AT_ONCE, ResultStore
from oomguard.probe import torch_memory

# Check that ``fn`` returned one result for each item.


def check_results(results: Any, items: int) -> Sequence[Any]:
    """Return the results of ``fn`` as a list with one result for each item.

    Raises:
        UsageError: it is not such a list.
    """
    kind = type(results).__name__
    try:
        if _is_no_list(results):
            count = None
        else:
            count = len(results)
    except (TypeError, RuntimeError):  # a tensor or an array without dimensions, or a nested one
        count = None
    if count is None:
        hint = "fn must return a list with one result for each item"
        if hasattr(results, "iloc"):
            hint += ': table.to_dict("records"), series.tolist()'
        elif isinstance(results, Mapping):
            hint += (
                ": [{name: column[place] for name, column in results.items()} for place in "
                "range(len(items))]"
            )
        raise UsageError(f"fn returned a {kind}, not a list", hint=hint)
    if count != items:
        hint = "fn must return one result for each item, in the same order"
        raise UsageError(f"fn returned a {kind} of {count} results for {items} items", hint=hint)
    if type(results) is list:
        return results
    return [results[place] for place in range(items)]


def _is_no_list(results: Any) -> bool:
    """Return whether ``results[i]`` is not the result at position ``i``, as in mappings and
    tables.
    """
    if isinstance(results, (str, bytes, Mapping)) or hasattr(results, "iloc"):
        return True
    return not (hasattr(results, "__getitem__") and hasattr(results, "__len__"))


# The batch size is the user's, or it grows while batches fit and finish soon.

_FIRST_ROWS: Final = 8
_MOST_ROWS: Final = 1024
# A kill loses the current batch, so a batch should not take longer than this.
_LONG_S: Final = 30.0


class BatchSize:
    """Choose how many items ``map`` takes next; the guard decides how many run together.

    Args:
        rows: the user's batch size. None: start small and double.
    """

    def __init__(self, rows: int | None) -> None:
        if rows is None:
            self.rows = _FIRST_ROWS
        else:
            self.rows = rows
        self._grows = rows is None

    def ran(self, rows: int, took_s: float, *, in_parts: bool) -> None:
        """Record a batch; double the size after a full batch that ran whole and fast."""
        if in_parts or took_s > _LONG_S / 2:
            self._grows = False
        if self._grows and rows == self.rows:
            self.rows = min(2 * self.rows, _MOST_ROWS)


OnError = Literal["raise", "record"]
_FIRST_WAIT_S: Final = 0.01
_LONGEST_WAIT_S: Final = 0.5
# A long job has many failed attempts, and each one holds the output of its failure.
_MOST_ATTEMPTS: Final = 1000
# Characters of an error message in a log line.
_SHOWN: Final = 120


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """Hold the user's choices.

    Attributes:
        on_error: what to do if ``fn`` raises an error that is not an out-of-memory.
        clear_cache_every: items after which torch's cache is emptied. None: do not.
        guard: the options of the guard.
    """

    on_error: OnError = "raise"
    clear_cache_every: int | None = None
    guard: dict[str, Any] = field(default_factory=dict)


class MapRun:
    """Compute the items of one call, unless another worker has claimed them.

    Args:
        call: ``fn``.
        items: the items.
        store: the store for the results, under the number ``computation``.
        claims: the claims of this worker.
        codec: converts results to bytes.
        size: the batch size.
        ways: the user's choices.
        progress: the progress bar.
    """

    def __init__(
        self,
        call: Callable[[list[Any]], Any],
        items: Items,
        store: ResultStore,
        computation: int,
        claims: Claims,
        codec: Codec,
        size: BatchSize,
        ways: WorkOptions,
        progress: MapProgress,
    ) -> None:
        self._call = call
        self.items = items
        self._store = store
        self._computation = computation
        self._claims = claims
        self._codec = codec
        self._size = size
        self._ways = ways
        self._progress = progress
        self.failed: dict[int, FailedItem] = {}
        self.computed = 0
        self.attempts: deque[Attempt] = deque(maxlen=_MOST_ATTEMPTS)
        self._began_at = time.time()
        self._next = 0
        self._elsewhere = list[int]()
        self._cleared_at = 0
        self._is_in_parts = False
        self._guarded: Any = guard(batch="indices", **ways.guard)(self._named())
        self._guard_of_one = guard(**ways.guard)

    def steps(self) -> Iterator[None]:
        """Do one batch in each step until every item is finished or failed.

        Finished items are stored, whatever ends the work.
        """
        try:
            while self.items.is_indexed and not self.items.all_read:
                self.items.read()
            self._show()
            wait_s = _FIRST_WAIT_S
            while True:
                batch = self._next_batch()
                if not batch and self._next == len(self.items.rows) and not self.items.all_read:
                    self._show()
                    # all items read so far are finished, so ``imap`` can yield them before more is
                    # read
                    yield
                    continue
                batch = batch or self._from_elsewhere()
                if batch:
                    self._take(batch)
                    wait_s = _FIRST_WAIT_S
                elif self._elsewhere:
                    time.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                elif self.items.all_read and self._next == len(self.items.rows):
                    return
                self._show()
                yield
        except BaseException as stop:
            if not isinstance(stop, (OomguardError, GeneratorExit)):
                kept = (
                    f"{self.computed} items that this call finished are kept in {self._store.path}"
                )
                add_note(stop, f"oomguard: {kept}; the next call continues from there")
            raise

    def look(self, index: int) -> bool:
        """Return whether an item is finished or failed, also by another worker."""
        if self.items.rows[index] == WAITING:
            self._settle_finished([index])
        return self.items.rows[index] != WAITING

    def _next_batch(self) -> list[int]:
        """Claim the next free items, without reading further; return those to compute."""
        batch: list[int] = []
        while len(batch) < self._size.rows:
            if self._next == len(self.items.rows):
                if self.items.all_read or (batch and self.items.stopped_by):
                    break
                if not self.items.read(self._size.rows - len(batch)) and not batch:
                    self._next = len(self.items.rows)
                    break
                continue
            index = self._next
            self._next = self._next + 1
            if self.items.rows[index] == WAITING:
                (batch if self._claim(index) else self._elsewhere).append(index)
        return self._still_waiting(batch)

    def _from_elsewhere(self) -> list[int]:
        """Check the items of other workers again, and claim those that an ended worker left."""
        self._settle_finished(self._elsewhere)
        waiting = [index for index in self._elsewhere if self.items.rows[index] == WAITING]
        batch = list[int]()
        self._elsewhere = list[int]()
        for index in waiting:
            is_taken = len(batch) < self._size.rows and self._claim(index)
            (batch if is_taken else self._elsewhere).append(index)
        return self._still_waiting(batch)

    def _still_waiting(self, batch: list[int]) -> list[int]:
        """Return the claimed items that no worker finished between lookup and claim."""
        self._settle_finished(batch)
        for index in batch:
            if self.items.rows[index] != WAITING:
                self._claims.give_back(self._computation, *self.items.key_of(index))
        return [index for index in batch if self.items.rows[index] == WAITING]

    def _settle_finished(self, indices: Sequence[int]) -> None:
        """Look up the waiting items, because other workers may have stored them."""
        waiting = [index for index in indices if self.items.rows[index] == WAITING]
        for start in range(0, len(waiting), ASKED_AT_ONCE):
            keys = {
                index: self.items.key_of(index) for index in waiting[start : start + ASKED_AT_ONCE]
            }
            found = self._store.find(self._computation, list(keys.values()))
            failed = self._store.failures(self._computation, self._began_at)
            for index, key in keys.items():
                if key in found:
                    self.items.settle(index, found[key])
                elif key in failed:  # another worker tried it in the meantime
                    never_fits, error = failed[key]
                    self._settle_failed(index, error, never_fits=never_fits)

    def _take(self, batch: list[int]) -> None:
        """Compute the claimed items of a batch, then release the claims."""
        began_s = time.monotonic()
        self._is_in_parts = False
        try:
            self._finish(batch)
        finally:
            self._claims.give_back_all()
        self._size.ran(len(batch), time.monotonic() - began_s, in_parts=self._is_in_parts)
        every = self._ways.clear_cache_every
        if every is not None and self.computed - self._cleared_at >= every:
            torch_memory.release()
            self._cleared_at = self.computed

    def _finish(self, batch: list[int]) -> None:
        """Compute items until each is stored or failed; halve a failed batch to find the item."""
        waiting = [index for index in batch if self.items.rows[index] == WAITING]
        if not waiting:
            return
        if len(waiting) > 1:
            error = self._run(waiting)
        else:
            error = self._run_alone(waiting[0])
        try:
            if error is None:
                return
            never_fits = _is_memory_failure(error)
            if isinstance(error, OomguardError) or not (
                never_fits or self._ways.on_error == "record"
            ):
                if len(waiting) > 1:
                    several = f" to items[{waiting[-1]}]"
                else:
                    several = ""
                add_note(error, f"oomguard: raised for items[{waiting[0]}]{several}")
                raise error
            if len(waiting) == 1:
                self._fail(waiting[0], error, never_fits=never_fits)
                return
        finally:
            error = None  # the exception holds the frames of the failure with their tensors
        half = len(waiting) // 2
        self._finish(waiting[:half])
        self._finish(waiting[half:])

    def _run(self, indices: list[int]) -> BaseException | None:
        """Compute items together, split if memory requires it; return the exception or None."""
        self._guarded.attempts = ()
        _, error = run_guarded(self._guarded, (indices,), {})
        self._tried(self._guarded.attempts)
        return error

    def _run_alone(self, index: int) -> BaseException | None:
        """Compute one item with the engine calls of ``fn`` under the guard.

        Prefill in chunks may make a long prompt fit.
        """
        with self._guard_of_one as made:
            _, error = run_guarded(self._compute, ([index],), {})
            if error is not None:
                state_of(made).explain(error)
        self._tried(made.attempts)
        state_of(made).forget_attempts()
        return error

    def _tried(self, attempts: Sequence[Attempt]) -> None:
        if any(not attempt.succeeded for attempt in attempts):
            self.attempts.extend(attempts)
            self._is_in_parts = True

    def _named(self) -> Callable[[list[int]], list[int]]:
        """Return the guarded function under the name of ``fn``, which a surrounding watch shows."""

        def compute(indices: list[int]) -> list[int]:
            return self._compute(indices)

        compute.__qualname__ = getattr(self._call, "__qualname__", "fn")
        return compute

    def _compute(self, indices: list[int]) -> list[int]:
        """Compute the waiting items and store them; the guard calls it, whole or in parts."""
        waiting = [index for index in indices if self.items.rows[index] == WAITING]
        if waiting:
            results = self._call([self.items[index] for index in waiting])
            self._keep(waiting, check_results(results, len(waiting)))
        return indices

    def _keep(self, indices: list[int], results: Sequence[Any]) -> None:
        stored = [
            (self.items.key_of(index), *self._codec.written(result, f"items[{index}]"))
            for index, result in zip(indices, results, strict=True)
        ]
        for index, row in zip(indices, self._store.put(self._computation, stored), strict=True):
            self.items.settle(index, row)
        self.computed += len(indices)

    def _fail(self, index: int, error: BaseException, *, never_fits: bool) -> None:
        notes = getattr(error, "__notes__", ())
        text = "\n".join([f"{type(error).__name__}: {error}", *map(str, notes)])
        clear(error)
        self._store.fail(
            self._computation, self.items.key_of(index), time.time(), text, never_fits=never_fits
        )
        self._settle_failed(index, text, never_fits=never_fits)
        failed = self.failed[index]
        get_logger().warning(
            "an item failed",
            key=failed.key,
            index=index,
            error=shorten(text.partition("\n")[0], _SHOWN),
        )
        torch_memory.release()

    def _settle_failed(self, index: int, error: str, *, never_fits: bool) -> None:
        self.failed[index] = FailedItem(index, self.items.shown_key(index), error, never_fits)
        self.items.settle(index, FAILED)

    def _claim(self, index: int) -> bool:
        return self._claims.take(self._computation, *self.items.key_of(index))

    def _show(self) -> None:
        self._progress.show(
            self.items.settled, self.items.total, failed=len(self.failed), batch=self._size.rows
        )


def _is_memory_failure(error: BaseException) -> bool:
    return not disabled() and is_out_of_memory(error)


# Results are read from the store on access, in the order of the items.

R = TypeVar("R")
_READ_AT_ONCE: Final = 64


class Reader:
    """Read results by their rows from the store, which is opened on first use."""

    def __init__(self, path: Path, codec: Codec) -> None:
        self._path = path
        self._codec = codec
        self._store: ResultStore | None = None
        self._lock = threading.Lock()

    def read(self, rows: Sequence[int]) -> list[Any]:
        """Return the results of rows, in this order.

        Raises:
            StoreError: a result is not readable.
        """
        with self._lock:
            if self._store is None:
                self._store = ResultStore(self._path)
                weakref.finalize(self, self._store.close)
            stored = self._store.values(rows)
        return [self._decoded(row, *stored[row]) for row in rows]

    def close(self) -> None:
        """Close the store; the next read opens it again."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _decoded(self, row: int, form: str, content: bytes) -> Any:
        try:
            return self._codec.read(form, content)
        except (ValueError, KeyError, IndexError, RecursionError) as error:
            hint = "give the decode= that matches the encode= of the store, or delete the row"
            message = f"{self._path}: result {row} cannot be read: {type(error).__name__}: {error}"
            raise StoreError(message, hint=hint) from error


class Results(Sequence["R | FailedItem"], Generic[R]):
    """Hold the results of a ``map`` in the order of its items, read from the store on access.

    ```python
    results = oomguard.map(generate, prompts, store="results.sqlite")
    print(results[0], len(results.failed))
    ```

    A failed item has its ``FailedItem`` as its result, like exceptions in
    ``asyncio.gather(return_exceptions=True)``.

    Attributes:
        failed: the failed items, in order.
        computed: the number of items that this call computed.
        reused: the number of items that earlier calls or other workers computed.
        other_results: the number of results of other computations in the store.
        attempts: the attempts of each call of ``fn`` that first ran out of memory; only the last
            1,000 are kept.
    """

    def __init__(self, reader: Reader, work: MapRun, other_results: int) -> None:
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
            raise IndexError(f"result {index} does not exist: there are {len(self)}") from None
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
            "Results read from an open store and cannot be pickled or copied: use list(results)"
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


# Show a progress bar of finished items on standard error.


# Loading rich draws from Python's random generator, and structlog loads rich. A program that has
# called ``random.seed`` would then get other random numbers.


@contextlib.contextmanager
def keep_random_state(library: str) -> Iterator[None]:
    """Restore Python's random generator after ``library`` is loaded inside the context.

    Other threads use the generator too. So it stays untouched if the library is already loaded, and
    the context should contain only the import.
    """
    if library in sys.modules:
        yield
        return
    import random  # a larger module of the standard library

    before = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != before:
            random.setstate(before)


class MapProgress:
    """Show a progress bar on a terminal, and nothing elsewhere."""

    def __init__(self, *, wanted: bool) -> None:
        self.shown = wanted and sys.stderr is not None and sys.stderr.isatty()
        self._progress: Any = None
        self._task: Any = None
        self._lock = threading.RLock()

    def __enter__(self) -> MapProgress:
        if self.shown:
            with keep_random_state("rich.style"):
                from rich.console import Console
                from rich.progress import (
                    BarColumn,
                    MofNCompleteColumn,
                    Progress,
                    TextColumn,
                    TimeRemainingColumn,
                )

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[batch]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("items", total=None, batch="")
            self._progress.start()
            pauses.append(self.paused)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            with self._lock:
                with suppress(ValueError):
                    pauses.remove(self.paused)
                self._progress.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the bar while a line is written, then draw it again below."""
        live = self._progress.live
        with self._lock:
            if not live.is_started:
                yield
                return
            live.transient = True  # stopping erases the bar
            self._progress.stop()
            try:
                yield
            finally:
                live.transient = False
                self._progress.start()

    def show(self, done: int, total: int | None, *, failed: int = 0, batch: int = 0) -> None:
        """Update the bar; ``total`` is None if the number of items is unknown."""
        if self._progress is not None:
            words = [f"{batch} at a time"] * bool(batch) + [f"{failed} failed"] * bool(failed)
            self._progress.update(self._task, completed=done, total=total, batch=", ".join(words))
