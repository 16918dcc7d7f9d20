"""Apply a function to many items with ``map``, ``imap`` and ``amap``, each item once."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import itertools
import json
import os
import shlex
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict, TypeVar, Unpack

from oomguard.core.errors import SettingError, StoreError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.log import get_logger
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName, guard
from oomguard.mapping.claims import Claims
from oomguard.mapping.computation import Computation, computation_of, differences
from oomguard.mapping.items import FAILED, FailedItem, Items
from oomguard.mapping.serialization import Codec
from oomguard.mapping.store import FinishedResults, ResultStore
from oomguard.mapping.work import (
    BatchSize,
    MapProgress,
    MapRun,
    OnError,
    Reader,
    Results,
    WorkOptions,
)

# A call's options are checked before anything is computed.

Call = Callable[[list[Any]], Any]
# SQLite and the claims add a suffix to the store's name.
_LONGEST_ENDING: Final = "-journal"
_SHOWN: Final = 60
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
        guard(**of_guard)  # this rejects an unknown effect or setting
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
            for _ in itertools.chain(work.steps(), (None,)):  # once more after the last step
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
                if len(str(store)) <= _SHOWN:
                    shown = str(store)
                else:
                    shown = f"{str(store)[:_SHOWN]}..."
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
        if not nearest or len(found) <= len(nearest):  # the latest one of equally similar ones
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
    found = next((found for code in codes if (found := differences(own, code))), None)
    if found is not None:
        hint = (
            'to compute them again, change the identity: {"version": 2, ...}; to keep them '
            'without this warning: {"code": "any", ...}'
        )
        message = "other code computed stored results of this identity"
        get_logger().warning(message, results=count, differs="; ".join(found), hint=hint)


T = TypeVar("T")
R = TypeVar("R")


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
            tells you if other code computed stored results of this identity. None (default): use
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
                raise asyncio.CancelledError from None  # the loop is closing, so no item failed
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
