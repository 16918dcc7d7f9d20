"""What one call of ``map`` is asked to do, checked before anything is computed, and the store opened for it."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict

from oomguard.errors import SettingError
from oomguard.facts import FactValue
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName, guard
from oomguard.log import get_logger
from oomguard.mapping.batches import BatchSize
from oomguard.mapping.claims import Claims
from oomguard.mapping.computation import Computation, computation_of
from oomguard.mapping.finished import Finished
from oomguard.mapping.items import FAILED, Items
from oomguard.mapping.progress import MapProgress
from oomguard.mapping.results import Reader, Results
from oomguard.mapping.store import Store
from oomguard.mapping.values import Codec
from oomguard.mapping.work import OnError, Ways, Work

Call = Callable[[list[Any]], Any]
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
class Job:
    """One call of ``map``."""

    path: Path
    computation: Computation
    key: Callable[[Any], Any] | None
    batch_size: int | None
    codec: Codec
    ways: Ways
    progress: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], store: str | PathLike[str], options: MapOptions) -> Job:
        """Check what is asked.

        Raises:
            SettingError: a number that is none of batches, an unknown way.
            UsageError: what identifies the computation is not known.
        """
        for name in ("batch_size", "clear_cache_every"):
            value = options.get(name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise SettingError(f"{name}={value!r}", hint="a number of items from 1, or None")
        on_error = options.get("on_error", "raise")
        if on_error not in _ON_ERROR:
            raise SettingError(f"on_error={on_error!r}", hint='on_error="raise" or on_error="record"')
        of_guard: dict[str, Any] = {
            "allow": options.get("allow"),
            "floors": options.get("floors"),
            "pin": options.get("pin", ()),
            "max_attempts": options.get("max_attempts", DEFAULT_MAX_ATTEMPTS),
        }
        guard(**of_guard)  # an effect or a setting that is none is told here
        return cls(
            Path(store).absolute(),  # results are read from it later, wherever the program works then
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
        with self._open(call, items) as (work, _), contextlib.closing(Reader(self.path, self.codec)) as reader:
            rows, given = work.items.rows, 0
            for _ in itertools.chain(work.steps(), (None,)):  # once more after the last
                while given < len(rows) and work.look(given):
                    yield work.failed[given] if rows[given] == FAILED else reader.read([rows[given]])[0]
                    given += 1

    @contextmanager
    def _open(self, call: Call, items: Iterable[Any]) -> Iterator[tuple[Work, int]]:
        """Open the store for the work, with the number of its results of other computations."""
        with (
            contextlib.closing(Claims(self.path)) as claims,
            contextlib.closing(Store(self.path, claims)) as store,
            MapProgress(wanted=self.progress) as progress,
        ):
            computation = store.number(self.computation)
            counts = store.counts()
            own, others = counts.pop(computation, 0), sum(counts.values())
            if store.network is not None:
                hint = "let no second machine work on it; a local disk is faster"
                get_logger().warning(
                    "the store is on a network folder", file_system=store.network, path=self.path, hint=hint
                )
            if others and not own:
                differs = _difference(self.computation.described, map(store.described, counts))
                get_logger().warning("no result of this computation is in the store", others=others, differs=differs)
            finished = Finished(store, computation, own)
            size, found = BatchSize(self.batch_size), Items(items, self.key, finished)
            yield Work(call, found, store, computation, claims, self.codec, size, self.ways, progress), others


def _difference(own: str, others: Iterable[str]) -> str:
    """Return in what a computation differs from the one in the store that is most like it."""
    mine, least = json.loads(own), dict[str, str]()
    for other in map(json.loads, others):
        differs = {
            name: "the code of fn" if name == "code" else f"{name} {other.get(name)} -> {mine.get(name)}"
            for name in sorted({*mine, *other})
            if mine.get(name) != other.get(name)
        }
        if not least or len(differs) <= len(least):  # of several, the last one that was made
            least = differs
    return "; ".join(least.values())
