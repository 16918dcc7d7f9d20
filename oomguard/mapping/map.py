"""``map``, ``imap`` and ``amap``: a function over many items, each computed once, whatever ends the
program in between.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar, Unpack

from oomguard.core.errors import UsageError
from oomguard.core.facts import FactValue
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName
from oomguard.mapping.items import FailedItem
from oomguard.mapping.job import Job, MapOptions
from oomguard.mapping.results import Results
from oomguard.mapping.work import OnError

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
    return Job.of(fn, store, options).results(fn, items)


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
    return Job.of(fn, store, options).in_order(fn, items)


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
    job = Job.of(fn, store, options)
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
