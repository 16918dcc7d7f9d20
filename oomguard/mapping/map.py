"""Apply a function to many items with ``map``, ``imap`` and ``amap``, each item once.

Each batch runs under the guard, and its results are stored before the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import itertools
import json
import os
import shlex
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack, overload

from oomguard.core.errors import OomguardError, SettingError, StoreError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.incident import Attempt
from oomguard.core.log import get_logger, pauses
from oomguard.core.process import disabled
from oomguard.guarding.failure import add_note, clear, is_out_of_memory, run_guarded
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName, guard, state_of
from oomguard.mapping.computation import Computation, computation_of, differences
from oomguard.mapping.items import FAILED, WAITING, FailedItem, Items
from oomguard.mapping.store import ASKED_AT_ONCE, Claims, Codec, FinishedResults, ResultStore
from oomguard.probe import torch_memory

T = TypeVar("T")
R = TypeVar("R")

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
    except (TypeError, RuntimeError):
        # A tensor or an array without dimensions has no length.
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
_ERROR_CHARACTERS: Final = 120


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
        # Look up first: most items of other workers are finished by now, and need no claim.
        self._settle_finished(self._elsewhere)
        waiting = self._waiting(self._elsewhere)
        batch = list[int]()
        self._elsewhere = list[int]()
        for index in waiting:
            is_taken = len(batch) < self._size.rows and self._claim(index)
            (batch if is_taken else self._elsewhere).append(index)
        return self._still_waiting(batch)

    def _still_waiting(self, batch: list[int]) -> list[int]:
        """Return the claimed items that no worker finished between lookup and claim."""
        # A worker may have stored an item between our lookup and our claim.
        self._settle_finished(batch)
        for index in batch:
            if self.items.rows[index] != WAITING:
                self._claims.give_back(self._computation, *self.items.key_of(index))
        return self._waiting(batch)

    def _waiting(self, indices: Iterable[int]) -> list[int]:
        """Return the items without a result so far."""
        found = []
        for index in indices:
            if self.items.rows[index] == WAITING:
                found.append(index)
        return found

    def _settle_finished(self, indices: Sequence[int]) -> None:
        """Look up the waiting items, because other workers may have stored them."""
        waiting = self._waiting(indices)
        # SQLite limits the variables of one statement.
        for start in range(0, len(waiting), ASKED_AT_ONCE):
            part = waiting[start : start + ASKED_AT_ONCE]
            keys = {index: self.items.key_of(index) for index in part}
            found = self._store.find(self._computation, list(keys.values()))
            failed = self._store.failures(self._computation, self._began_at)
            for index, key in keys.items():
                if key in found:
                    self.items.settle(index, found[key])
                elif key in failed:
                    # Another worker tried it in the meantime.
                    never_fits, error = failed[key]
                    self._settle_failed(index, error, never_fits=never_fits)

    def _take(self, batch: list[int]) -> None:
        """Compute the claimed items of a batch, then release the claims."""
        began_s = time.monotonic()
        self._is_in_parts = False
        try:
            self._finish(batch)
        finally:
            # Released even after an error, so that other workers can try these items.
            self._claims.give_back_all()
        self._size.ran(len(batch), time.monotonic() - began_s, in_parts=self._is_in_parts)
        every = self._ways.clear_cache_every
        if every is not None and self.computed - self._cleared_at >= every:
            torch_memory.release()
            self._cleared_at = self.computed

    def _finish(self, batch: list[int]) -> None:
        """Compute items until each is stored or failed; halve a failed batch to find the item."""
        waiting = self._waiting(batch)
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
            # A mistake in the options concerns every item, so it is never recorded for one.
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
            # The exception holds the frames of the failure with their tensors.
            error = None
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
        waiting = self._waiting(indices)
        if waiting:
            results = self._call([self.items[index] for index in waiting])
            self._keep(waiting, check_results(results, len(waiting)))
        return indices

    def _keep(self, indices: list[int], results: Sequence[Any]) -> None:
        stored = []
        for index, result in zip(indices, results, strict=True):
            written = self._codec.written(result, f"items[{index}]")
            stored.append((self.items.key_of(index), *written))
        for index, row in zip(indices, self._store.put(self._computation, stored), strict=True):
            self.items.settle(index, row)
        self.computed += len(indices)

    def _fail(self, index: int, error: BaseException, *, never_fits: bool) -> None:
        notes = getattr(error, "__notes__", ())
        text = f"{type(error).__name__}: {error}"
        for note in notes:
            text = f"{text}\n{note}"
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
            error=shorten(text.partition("\n")[0], _ERROR_CHARACTERS),
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
        rows = [self._rows[index] for index in indices]
        read = iter(self._reader.read(list(filter(FAILED.__ne__, rows))))
        found: list[R | FailedItem] = []
        for index in indices:
            if self._rows[index] == FAILED:
                found.append(self._failed[index])
            else:
                found.append(next(read))
        return found


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
    # Loaded here, because it is a large module.
    import random

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
            # Stopping erases the bar.
            live.transient = True
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


# A call's options are checked before anything is computed.

Call = Callable[[list[Any]], Any]
# SQLite and the claims add a suffix to the store's name.
_LONGEST_ENDING: Final = "-journal"
_PATH_CHARACTERS: Final = 60
_ON_ERROR: Final = ("raise", "record")


class MapOptions(TypedDict, total=False):
    """Define the options of ``map``; see there."""

    identity: Mapping[str, Any] | None
    key: Callable[[Any], Any] | None
    batch_size: int | None
    on_error: OnError
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None
    clear_cache_every: int | None
    progress: bool
    allow: EffectName | None
    floors: Mapping[str, FactValue] | None
    pin: Collection[str]
    max_attempts: int


@dataclass(frozen=True, slots=True)
class MapJob:
    """Hold one checked call of ``map``."""

    path: Path
    computation: Computation
    key: Callable[[Any], Any] | None
    batch_size: int | None
    codec: Codec
    ways: WorkOptions
    progress: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], store: str | PathLike[str], options: MapOptions) -> MapJob:
        """Check the options of a call.

        Raises:
            SettingError: an option has an invalid value.
            UsageError: the computation cannot be identified.
        """
        if not callable(fn):
            hint = "give a function that takes a list of items and returns one result for each"
            raise UsageError(
                "fn must be a function, got None"
                if fn is None
                else f"fn must be a function, got a {type(fn).__name__}",
                hint=hint,
            )
        for name in ("batch_size", "clear_cache_every"):
            value = options.get(name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise SettingError(f"{name}={value!r}", hint="give a number of at least 1, or None")
        on_error = options.get("on_error", "raise")
        if on_error not in _ON_ERROR:
            raise SettingError(
                f"on_error={on_error!r}", hint='on_error="raise" or on_error="record"'
            )
        if not isinstance(shown := options.get("progress", True), bool):
            raise SettingError(f"progress={shown!r}", hint="progress=True or progress=False")
        for name in ("encode", "decode"):
            way = options.get(name)
            if way is not None and not callable(way):
                hint = f"give a function that takes one result, or None: {name}=FUNCTION"
                raise UsageError(f"{name} is a {type(way).__name__}", hint=hint)
        of_guard: dict[str, Any] = {
            "allow": options.get("allow"),
            "floors": options.get("floors"),
            "pin": options.get("pin", ()),
            "max_attempts": options.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
        }
        # guard() rejects an unknown effect or setting.
        guard(**of_guard)
        return cls(
            _path(store),
            computation_of(fn, options.get("identity")),
            options.get("key"),
            options.get("batch_size"),
            Codec(options.get("encode"), options.get("decode")),
            WorkOptions(on_error, options.get("clear_cache_every"), of_guard),
            options.get("progress", True),
        )

    def results(self, call: Call, items: Iterable[Any]) -> Results[Any]:
        """Compute all items and return the results."""
        with self._open(call, items) as (work, other_results):
            for _ in work.steps():
                pass
        return Results(Reader(self.path, self.codec), work, other_results)

    def in_order(self, call: Call, items: Iterable[Any]) -> Iterator[Any]:
        """Yield each result as soon as it and all earlier ones exist."""
        with (
            self._open(call, items) as (work, _),
            contextlib.closing(Reader(self.path, self.codec)) as reader,
        ):
            rows = work.items.rows
            given = 0
            # Sample once more after the last step.
            for _ in itertools.chain(work.steps(), (None,)):
                while given < len(rows) and work.look(given):
                    yield (
                        work.failed[given]
                        if rows[given] == FAILED
                        else reader.read([rows[given]])[0]
                    )
                    given += 1

    @contextmanager
    def _open(self, call: Call, items: Iterable[Any]) -> Iterator[tuple[MapRun, int]]:
        """Open the store, and yield the work with the number of results of other computations."""
        with (
            contextlib.closing(Claims(self.path)) as claims,
            contextlib.closing(_opened(self.path, claims)) as store,
            MapProgress(wanted=self.progress) as progress,
        ):
            computation = store.number(self.computation)
            counts = store.counts()
            own = counts.pop(computation, 0)
            others = sum(counts.values())
            if store.network is not None:
                hint = "use it from one machine only; a local disk is faster"
                get_logger().warning(
                    "the store is on a network folder",
                    file_system=store.network,
                    path=self.path,
                    hint=hint,
                )
            if others and not own:
                _tell_of_others(
                    self.computation, (store.described(number) for number in counts), others
                )
            if own and (code := self.computation.code) is not None:
                _tell_of_code(code, store.codes(computation), own)
            finished = FinishedResults(store, computation, own)
            size = BatchSize(self.batch_size)
            found = Items(items, self.key, finished)
            call = self._noting(call, store, computation)
            yield (
                MapRun(
                    call, found, store, computation, claims, self.codec, size, self.ways, progress
                ),
                others,
            )

    def _noting(self, call: Call, store: ResultStore, computation: int) -> Call:
        """Return ``call`` so that it stores its code before its first results."""
        code = self.computation.code
        noted = list[bool]()

        def noting(batch: list[Any]) -> Any:
            if code is not None and not noted:
                store.add_code(computation, code)
                noted.append(True)
            return call(batch)

        noting.__qualname__ = self.computation.name
        return noting


def _path(store: Any) -> Path:
    """Return the store's absolute path; the program may change folders before it reads results."""
    if (
        not isinstance(store, (str, PathLike))
        or not isinstance(os.fspath(store), str)
        or not os.fspath(store)
    ):
        raise UsageError(
            f"store must be a path, got {store!r}",
            hint='give the path of a file: store="results.sqlite"',
        )
    if isinstance(store, str) and (store == ":memory:" or store.startswith("file:")):
        hint = (
            'give the path of a file: store="results.sqlite"; for a file with this name: '
            f'store="./{store}"'
        )
        raise StoreError(
            f"store must be a file, which outlives the program, got {store!r} of SQLite",
            hint=hint,
        )
    path = Path(store).absolute()
    for name in (path.name, path.name + _LONGEST_ENDING):
        try:
            path.with_name(name).lstat()
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
                if isinstance(error, OSError):
                    amiss = "is too long"
                else:
                    amiss = "contains a null byte"
                if len(str(store)) <= _PATH_CHARACTERS:
                    shown = str(store)
                else:
                    shown = f"{str(store)[:_PATH_CHARACTERS]}..."
                raise StoreError(
                    f"the name {shown!r} {amiss}", hint='give another name: store="results.sqlite"'
                ) from None
    if path.is_dir():
        raise StoreError(
            f"{path} is a folder", hint=f'give a file in it: store="{path / "results.sqlite"}"'
        )
    if not path.parent.exists():
        hint = f"mkdir -p {shlex.quote(str(path.parent))}"
        raise StoreError(f"{path}: the folder {path.parent} does not exist", hint=hint)
    return path


def _opened(path: Path, claims: Claims) -> ResultStore:
    """Open the store; if the file is not a store, leave no other file next to it."""
    try:
        return ResultStore(path, claims)
    except StoreError:
        claims.remove_new()
        raise


def _tell_of_others(own: Computation, others: Iterable[str], count: int) -> None:
    """Log how a new computation differs from the most similar one in the store."""
    nearest = list[str]()
    name = ""
    for other in others:
        found = differences(own.described, other)
        # Of equally similar ones, take the latest.
        if not nearest or len(found) <= len(nearest):
            nearest = found
            name = json.loads(other)["function"]
    fields = {"others": count, "differs": "; ".join(nearest)}
    if own.code is not None and len(nearest) == 1 and nearest[0].startswith("function "):
        fields["hint"] = (
            f'if only the name changed, continue with identity={{"function": "{name}", ...}}'
        )
    get_logger().warning("the store has no result of this computation", **fields)


def _tell_of_code(own: str, codes: Iterable[str], count: int) -> None:
    """Warn that other code computed some of the stored results."""
    found = next(filter(None, (differences(own, code) for code in codes)), None)
    if found is not None:
        hint = (
            'to compute them again, change the identity: {"version": 2, ...}; to keep them '
            'without this warning: {"code": "any", ...}'
        )
        message = "other code computed stored results of this identity"
        get_logger().warning(message, results=count, differs="; ".join(found), hint=hint)


def map(  # noqa: A001 - what it is called everywhere
    fn: Callable[[list[T]], Sequence[R]],
    items: Iterable[T],
    *,
    store: str | PathLike[str],
    identity: Mapping[str, Any] | None = None,
    key: Callable[[T], Any] | None = None,
    batch_size: int | None = None,
    on_error: OnError = "raise",
    encode: Callable[[R], Any] | None = None,
    decode: Callable[[Any], R] | None = None,
    clear_cache_every: int | None = None,
    progress: bool = True,
    allow: EffectName | None = None,
    floors: Mapping[str, FactValue] | None = None,
    pin: Collection[str] = (),
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
) -> Results[R]:
    """Apply a function to batches of items that fit in memory, and store each result.

    ```python
    results = oomguard.map(generate, prompts, store="results.sqlite")
    for result in results:
        print(result)
    ```

    After a crash, a ``kill -9`` or Ctrl-C, call it again: it computes only what the store lacks.
    Several processes may use one store. Each item is computed by one of them, and the items of a
    killed process are free at once.

    Args:
        fn: takes a list of items and returns one result for each, in the same order, like the
            function of ``datasets.map(batched=True)``. If a batch runs out of memory, oomguard
            splits it as under ``guard(batch=...)`` and uses the size that fits for later batches.
        items: a list, a data set, or any iterable. A generator is read one batch at a time.
        store: an SQLite file, which is created if it does not exist. ``PATH.lock`` next to it
            coordinates workers.
        identity: other values that decide the results, by name: model, revision, sampling settings,
            seed, your own version. The module and name of ``fn``, its closure and the arguments of
            ``functools.partial`` count too. Results of another identity are not used. A warning
            warns you if other code computed stored results of this identity. None (default): use
            the code of ``fn`` (as ``joblib.Memory`` does), the texts, numbers and small containers
            that it reads, and the name, weights and settings of its models. Changes in other
            objects are not detected.
        key: returns a unique key of an item: a text, a number, or a tuple of them. None (default):
            use the content; each of several equal items has its own result.
        batch_size: the largest number of items in a batch. None (default): start with 8 and double
            after each batch that fits, up to 1,024 or until a batch takes 15 seconds.
        on_error: what to do if ``fn`` raises an error that is not an out-of-memory. "raise" stops
            and keeps finished results. "record" finds the failing item, records it and continues.
            An item that runs out of memory alone is recorded in both cases.
        encode: converts a result to something that can be stored. None (default): results are JSON,
            bytes, tensors, arrays, or lists, tuples and dictionaries of these. Tensors come back on
            the CPU. oomguard does not pickle.
        decode: reverses ``encode``.
        clear_cache_every: collect garbage and empty torch's cache after this many items. None: do
            not.
        progress: whether to show a progress bar if standard error is a terminal.
        allow: the highest effect of a patch, as in ``guard``.
        floors: the minimum of each setting.
        pin: settings that must not change.
        max_attempts: the largest number of attempts for one batch, including the first.

    Returns:
        The results in the order of ``items``. They are read from the store on access. ``failed``
        lists the items without a result.

    Raises:
        UsageError: the content of an item or a result is unknown, two items have the same key, or
            ``fn`` does not return one result for each item.
        StoreError: the store is damaged or full, or another version or program wrote it. Finished
            results are kept.
    """
    _check(fn)
    options: MapOptions = {
        "identity": identity,
        "key": key,
        "batch_size": batch_size,
        "on_error": on_error,
        "encode": encode,
        "decode": decode,
        "clear_cache_every": clear_cache_every,
        "progress": progress,
        "allow": allow,
        "floors": floors,
        "pin": pin,
        "max_attempts": max_attempts,
    }
    return MapJob.of(fn, store, options).results(fn, items)


def imap(
    fn: Callable[[list[T]], Sequence[R]],
    items: Iterable[T],
    *,
    store: str | PathLike[str],
    **options: Unpack[MapOptions],
) -> Iterator[R | FailedItem]:
    """Yield the results of ``map`` in order, each as soon as it and all earlier ones are finished.

    ```python
    for result in oomguard.imap(generate, prompts, store="results.sqlite"):
        print(result)
    ```

    ``imap`` relates to ``map`` like ``multiprocessing.Pool.imap`` to ``Pool.map``. It computes
    nothing before you ask for the first result. If you leave the iteration, the work ends and
    finished results are kept. A failed item yields its ``FailedItem``.

    Args:
        fn: see ``map``.
        items: see ``map``.
        store: see ``map``.
        options: the other options of ``map``.

    Raises:
        UsageError: see ``map``.
        StoreError: see ``map``.
    """
    _check(fn)
    return MapJob.of(fn, store, options).in_order(fn, items)


async def amap(
    fn: Callable[[list[T]], Sequence[R]] | Callable[[list[T]], Awaitable[Sequence[R]]],
    items: Iterable[T],
    *,
    store: str | PathLike[str],
    **options: Unpack[MapOptions],
) -> Results[R]:
    """Run ``map`` without blocking the event loop; ``fn`` may be a coroutine function.

    ```python
    results = await oomguard.amap(generate, prompts, store="results.sqlite")
    ```

    It is a coroutine, not an iterator, so it returns what ``map`` returns. oomguard runs a
    coroutine function on the current event loop, and a plain function in a thread. Cancelling also
    cancels the current batch of a coroutine function. A plain function finishes its batch, and the
    results are stored.

    Args:
        fn: see ``map``; or a coroutine function.
        items: see ``map``.
        store: see ``map``.
        options: the other options of ``map``.

    Raises:
        UsageError: see ``map``.
        StoreError: see ``map``.
    """
    job = MapJob.of(fn, store, options)
    loop = asyncio.get_running_loop()
    stopped = threading.Event()
    running = list[Any]()

    def call(batch: list[T]) -> Any:
        if stopped.is_set():
            raise asyncio.CancelledError
        if not inspect.iscoroutinefunction(fn):
            return fn(batch)
        running[:] = [asyncio.run_coroutine_threadsafe(fn(batch), loop)]
        try:
            return running[0].result()
        except Exception:
            if stopped.is_set():
                # The loop is closing, so no item failed.
                raise asyncio.CancelledError from None
            raise

    try:
        return await asyncio.to_thread(job.results, call, items)
    except asyncio.CancelledError:
        stopped.set()
        for batch in running:
            batch.cancel()
        raise


def _check(fn: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(fn):
        raise UsageError(
            "fn is a coroutine function, which map cannot call",
            hint="await oomguard.amap(fn, items, store=PATH)",
        )
