"""``map``, ``imap`` and ``amap``: a function over many items, each computed once, whatever ends the
program in between.
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
from oomguard.mapping.progress import MapProgress
from oomguard.mapping.serialization import Codec
from oomguard.mapping.store import Finished, ResultStore
from oomguard.mapping.work import BatchSize, MapRun, OnError, Reader, Results, Ways

# What one call of ``map`` is asked to do, checked before anything is computed, and the store
# opened for it.

Call = Callable[[list[Any]], Any]
# Files beside a store have its name and an ending.
_LONGEST_ENDING: Final = "-journal"
_SHOWN: Final = 60
_ON_ERROR: Final = ("raise", "record")


class MapOptions(TypedDict, total=False):
    """The options of ``map``, which explains them."""

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
    """One call of ``map``."""

    path: Path
    computation: Computation
    key: Callable[[Any], Any] | None
    batch_size: int | None
    codec: Codec
    ways: Ways
    progress: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], store: str | PathLike[str], options: MapOptions) -> MapJob:
        """Check what is asked.

        Raises:
            SettingError: a number that is none of batches, an unknown way.
            UsageError: what identifies the computation is not known.
        """
        if not callable(fn):
            hint = "give a function that takes a list of items and returns one result for each"
            raise UsageError(
                "fn is None" if fn is None else f"fn is a {type(fn).__name__}", hint=hint
            )
        for name in ("batch_size", "clear_cache_every"):
            value = options.get(name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise SettingError(f"{name}={value!r}", hint="a number of items from 1, or None")
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
                hint = f"give a function of one result, or None: {name}=FUNCTION"
                raise UsageError(f"{name} is a {type(way).__name__}", hint=hint)
        of_guard: dict[str, Any] = {
            "allow": options.get("allow"),
            "floors": options.get("floors"),
            "pin": options.get("pin", ()),
            "max_attempts": options.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
        }
        guard(**of_guard)  # an effect or a setting that is none is told here
        return cls(
            _path(store),
            computation_of(fn, options.get("identity")),
            options.get("key"),
            options.get("batch_size"),
            Codec(options.get("encode"), options.get("decode")),
            Ways(on_error, options.get("clear_cache_every"), of_guard),
            options.get("progress", True),
        )

    def results(self, call: Call, items: Iterable[Any]) -> Results[Any]:
        """Do all of it."""
        with self._open(call, items) as (work, other_results):
            for _ in work.steps():
                pass
        return Results(Reader(self.path, self.codec), work, other_results)

    def in_order(self, call: Call, items: Iterable[Any]) -> Iterator[Any]:
        """Yield each result as soon as it and those before it are there."""
        with (
            self._open(call, items) as (work, _),
            contextlib.closing(Reader(self.path, self.codec)) as reader,
        ):
            rows = work.items.rows
            given = 0
            for _ in itertools.chain(work.steps(), (None,)):  # once more after the last
                while given < len(rows) and work.look(given):
                    yield (
                        work.failed[given]
                        if rows[given] == FAILED
                        else reader.read([rows[given]])[0]
                    )
                    given += 1

    @contextmanager
    def _open(self, call: Call, items: Iterable[Any]) -> Iterator[tuple[MapRun, int]]:
        """Open the store for the work, with the number of its results of other computations."""
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
                hint = "let no second machine work on it; a local disk is faster"
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
            finished = Finished(store, computation, own)
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
        """Return ``call`` so that its code is noted before the first results of it are stored."""
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
    """Return the absolute path of a store: results are read from it later, wherever the program
    works then.
    """
    if (
        not isinstance(store, (str, PathLike))
        or not isinstance(os.fspath(store), str)
        or not os.fspath(store)
    ):
        raise UsageError(
            f"store is {store!r}", hint='give the path of a file: store="results.sqlite"'
        )
    if isinstance(store, str) and (store == ":memory:" or store.startswith("file:")):
        hint = (
            f'give the path of a file: store="results.sqlite"; store="./{store}" where it is '
            "called so"
        )
        raise StoreError(
            f"store is {store!r}, of SQLite: a store is a file, which outlives the program",
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
                    amiss = "has a null byte in it"
                if len(str(store)) <= _SHOWN:
                    shown = str(store)
                else:
                    shown = f"{str(store)[:_SHOWN]}..."
                raise StoreError(
                    f"the name {shown!r} {amiss}", hint='give another: store="results.sqlite"'
                ) from None
    if path.is_dir():
        raise StoreError(
            f"{path}: it is a folder", hint=f'give a file in it: store="{path / "results.sqlite"}"'
        )
    if not path.parent.exists():
        hint = f"mkdir -p {shlex.quote(str(path.parent))}"
        raise StoreError(f"{path}: the folder {path.parent} is not there", hint=hint)
    return path


def _opened(path: Path, claims: Claims) -> ResultStore:
    """Open the store; nothing is left beside a file that is none."""
    try:
        return ResultStore(path, claims)
    except StoreError:
        claims.remove_new()
        raise


def _tell_of_others(own: Computation, others: Iterable[str], count: int) -> None:
    """Say in what a computation without results differs from the one in the store that is most like
    it.
    """
    nearest = list[str]()
    name = ""
    for other in others:
        found = differences(own.described, other)
        if not nearest or len(found) <= len(nearest):  # of several, the last one that was made
            nearest = found
            name = json.loads(other)["function"]
    told = {"others": count, "differs": "; ".join(nearest)}
    if own.code is not None and len(nearest) == 1 and nearest[0].startswith("function "):
        told["hint"] = (
            f'identity={{"function": "{name}", ...}} goes on with them, where only the name changed'
        )
    get_logger().warning("no result of this computation is in the store", **told)


def _tell_of_code(own: str, codes: Iterable[str], count: int) -> None:
    """Say where results that are taken were computed by other code."""
    found = next((found for code in codes if (found := differences(own, code))), None)
    if found is not None:
        hint = (
            'another identity, as {"version": 2, ...}, computes them anew; {"code": "any", ...} '
            "takes them as they are"
        )
        message = "results of this identity were computed by other code"
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
    """Apply a function to batches of items that fit in memory, and store each result as it is
    finished.

    Called again, after a crash, a ``kill -9`` or a Ctrl-C, or with more items, it computes only
    what is not in the store. Several processes may call it with one store: each item is computed by
    one of them, and what a killed one had begun is free at once.

    Args:
        fn: takes a list of items and returns one result for each, in the same order, as
            ``datasets.map(batched=True)`` has it. Where a batch runs out of memory it is made
            smaller as under ``guard(batch=...)``; the size that fits serves the batches after it.
        items: a list, a data set, or any iterable; a generator is read one batch at a time.
        store: an SQLite file, made where there is none; ``PATH.lock`` beside it keeps workers
            apart.
        identity: what else decides the results, by name: model, revision, sampling settings, seed,
            a version of your own. It counts beside the module and name of ``fn``, what it closes
            over and what ``functools.partial`` bound; results of another identity are left alone,
            and a warning tells where other code computed those of this one. None: the code of
            ``fn`` (as ``joblib.Memory`` has it), the texts, numbers and small containers that it
            reads from around it, and the models it uses, by name, values of their weights and
            settings; what it reads from other objects is not seen.
        key: gives what identifies an item, a text, a number or a tuple of them, each its own. None:
            its content; equal items have a result each.
        batch_size: the items taken at a time at most. None: 8, then twice as many after each batch
            that fits, to 1,024 or until a batch takes 15 seconds.
        on_error: where ``fn`` raises something else than a memory failure: "raise" it, with what is
            finished kept, or "record" the item that raises it alone and go on. An item that runs
            out of memory alone is recorded in either case.
        encode: makes of a result something that can be stored. None: it is JSON, bytes, a tensor,
            an array, or lists, tuples and dicts of these; tensors come back on the CPU. Nothing is
            pickled.
        decode: undoes that.
        clear_cache_every: computed items after which garbage is collected and torch's cache is
            emptied; None: it is not.
        progress: whether a bar is shown where standard error is a terminal.
        allow: highest effect a patch may have, as of ``guard``.
        floors: never go below these values, by setting.
        pin: settings that are never touched.
        max_attempts: runs of one batch, the first included.

    Returns:
        The results in the order of ``items``, read from the store when they are asked for;
        ``failed`` holds the items without one.

    Raises:
        UsageError: an item or a result whose content cannot be told, two items of one key, a
            function that is no such function.
        StoreError: a store that is damaged, full, another version's or another program's; what was
            finished is kept.
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
    """Yield the results of ``map`` in the order of the items, each as soon as it and those before
    it are finished.

    It is to ``map`` what ``multiprocessing.Pool.imap`` is to ``Pool.map``. Nothing is computed
    before the first result is asked for, and an iteration that is left ends the work, with what is
    finished kept. An item that failed has its ``FailedItem`` in its place.

    Args:
        fn: as of ``map``.
        items: as of ``map``.
        store: as of ``map``.
        options: all others of ``map``.

    Raises:
        UsageError: as ``map``.
        StoreError: as ``map``.
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
    """Do what ``map`` does without holding up the event loop; ``fn`` may be a coroutine function,
    which runs on that loop.

    It is a coroutine and no iterator, so that it returns what ``map`` returns. A plain ``fn`` is
    called in a thread. Where it is cancelled, the batch of a coroutine function is too; a plain one
    ends its batch in the thread, and it is stored.

    Args:
        fn: as of ``map``, or a coroutine function.
        items: as of ``map``.
        store: as of ``map``.
        options: all others of ``map``.

    Raises:
        UsageError: as ``map``.
        StoreError: as ``map``.
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
                raise asyncio.CancelledError from None  # no failure of an item
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
            "fn is a coroutine function", hint="await oomguard.amap(fn, items, store=PATH)"
        )
