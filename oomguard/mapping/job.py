"""What one call of ``map`` is asked to do, checked before anything is computed, and the store
opened for it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypedDict

from oomguard.core.errors import SettingError, StoreError, UsageError
from oomguard.core.facts import FactValue
from oomguard.core.log import get_logger
from oomguard.guarding.guard import DEFAULT_MAX_ATTEMPTS, EffectName, guard
from oomguard.mapping.claims import Claims
from oomguard.mapping.computation import Computation, computation_of, differences
from oomguard.mapping.items import FAILED, Items
from oomguard.mapping.progress import MapProgress
from oomguard.mapping.results import Reader, Results
from oomguard.mapping.serialization import Codec
from oomguard.mapping.store import Finished, Store
from oomguard.mapping.work import BatchSize, OnError, Ways, Work

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
    def _open(self, call: Call, items: Iterable[Any]) -> Iterator[tuple[Work, int]]:
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
                _tell_of_others(self.computation, map(store.described, counts), others)
            if own and (code := self.computation.code) is not None:
                _tell_of_code(code, store.codes(computation), own)
            finished = Finished(store, computation, own)
            size = BatchSize(self.batch_size)
            found = Items(items, self.key, finished)
            call = self._noting(call, store, computation)
            yield (
                Work(
                    call, found, store, computation, claims, self.codec, size, self.ways, progress
                ),
                others,
            )

    def _noting(self, call: Call, store: Store, computation: int) -> Call:
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


def _opened(path: Path, claims: Claims) -> Store:
    """Open the store; nothing is left beside a file that is none."""
    try:
        return Store(path, claims)
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
