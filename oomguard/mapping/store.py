"""The store of ``map``: finished results in one SQLite file, by computation, item and occurrence.

The journal is written ahead (WAL) and ``synchronous`` is NORMAL: what was committed is in the
kernel's hands, so it survives any death of the process; after a loss of power the last seconds may
be missing, and the file is whole. On a network folder, where SQLite's shared memory does not work,
the journal is rolled back and each commit is waited for (https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import StoreError
from oomguard.core.installation import upgrade_hint
from oomguard.mapping.claims import Claims
from oomguard.mapping.computation import Computation

# Which file system a path lies on, and whether another machine may have it mounted too.

MOUNTS: Final = Path("/proc/self/mountinfo")


@functools.cache
def store_data() -> dict[str, Any]:
    """Return what store.toml says."""
    return tomllib.loads(Path(__file__).with_name("store.toml").read_text(encoding="utf-8"))


def network_file_system(path: Path) -> str | None:
    """Return the type of the file system where it is one that several machines share; None of a
    local one, and where nothing tells.
    """
    kind = _file_system(path)
    if kind in store_data()["network_file_systems"]:
        return kind
    return None


def _file_system(path: Path) -> str | None:
    """Return the type of the file system that is mounted deepest above a path
    (proc_pid_mountinfo(5)).
    """
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return None
    deepest = -1
    kind = None
    for line in lines:
        own, _, rest = line.partition(" - ")
        words = own.split(" ")
        if len(words) < 5 or not rest:
            continue
        mounted = Path(words[4].encode("latin-1", "surrogateescape").decode("unicode_escape"))
        # Of two mounts on one folder the later one is on top.
        if place.is_relative_to(mounted) and len(mounted.parts) >= deepest:
            deepest = len(mounted.parts)
            kind = rest.split(" ")[0]
    return kind


SCHEMA_VERSION: Final = 1
# "oogm" in ASCII: what tells a store from another program's SQLite file.
APPLICATION_ID: Final = 0x6F6F676D
_BUSY_S: Final = 60.0
# Pages of the journal (32 MiB) after which they are copied into the file, which waits for the disk;
# SQLite does after 1,000.
_CHECKPOINT_PAGES: Final = 8192
# Values in one question to SQLite: 999 are allowed in versions before 3.32.
ASKED_AT_ONCE: Final = 900
Key = tuple[bytes, int]
"""An item's digest and how many equal ones come before it."""
_FIND: Final = """
SELECT item, occurrence, id FROM result WHERE computation = ? AND item IN ({}) AND occurrence BETWEEN ? AND ?"""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS computation (
  id INTEGER PRIMARY KEY,
  digest BLOB NOT NULL UNIQUE,
  described TEXT NOT NULL,         -- JSON object: what identifies it
  code TEXT NOT NULL DEFAULT '[]'  -- JSON list: the codes that computed results, where they do not identify it
);
CREATE TABLE IF NOT EXISTS result (
  id INTEGER PRIMARY KEY,
  computation INTEGER NOT NULL,
  item BLOB NOT NULL,              -- digest of the item's content, or of what key= gave
  occurrence INTEGER NOT NULL,     -- how many equal items come before it
  UNIQUE (computation, item, occurrence)
);
CREATE TABLE IF NOT EXISTS value ( -- apart: results are looked up without reading what they hold
  id INTEGER PRIMARY KEY,          -- of the result
  form TEXT NOT NULL,              -- json, bytes, tree, torch, numpy
  crc32 INTEGER NOT NULL,
  content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS failure (
  computation INTEGER NOT NULL,
  item BLOB NOT NULL,
  occurrence INTEGER NOT NULL,
  failed_at REAL NOT NULL,         -- Unix seconds
  never_fits INTEGER NOT NULL,     -- 1: it alone ran out of memory
  error TEXT NOT NULL,
  PRIMARY KEY (computation, item, occurrence)
) WITHOUT ROWID;
"""


class ResultStore:
    """One call's connection to a store; several calls, in several processes, may have the same one
    open.

    Args:
        path: the file; it is made where there is none.
        claims: whose lock keeps others from opening it at the same moment; None: it is there, and
            only read.

    Raises:
        StoreError: here and in all that follows: it is no store, is damaged, a newer oomguard's,
            full, or cannot be written.
    """

    def __init__(self, path: Path, claims: Claims | None = None) -> None:
        self.path = path
        self.network = network_file_system(path)
        with self._telling(), nullcontext() if claims is None else claims.opening():
            if claims is None:
                mode = "rw"
            else:
                mode = "rwc"
            self._database = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                if claims is not None:
                    self._begin()
            except BaseException:
                self._database.close()
                raise

    def _begin(self) -> None:
        run = self._database.execute
        version, application = (
            run(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        if version > SCHEMA_VERSION and application == APPLICATION_ID:
            what = f"a newer oomguard wrote it (schema {version}, this one knows {SCHEMA_VERSION})"
            raise StoreError(
                f"{self.path}: {what}", hint=f"{upgrade_hint()}; or give another path: store=PATH"
            )
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and not is_new:
            raise StoreError(
                f"{self.path}: it is another program's database",
                hint="give another path: store=PATH; the file is left as it is",
            )
        run("PRAGMA journal_mode = DELETE" if self.network else "PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL" if self.network else "PRAGMA synchronous = NORMAL")
        run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        if is_new:
            versions = (
                f"PRAGMA user_version = {SCHEMA_VERSION}; PRAGMA application_id = {APPLICATION_ID};"
            )
            self._database.executescript(f"BEGIN; {_TABLES} {versions} COMMIT;")

    def number(self, computation: Computation) -> int:
        """Return the number of a computation, which is noted where it is new."""
        with self._telling():
            row = (computation.digest, computation.described)
            self._database.execute(
                "INSERT OR IGNORE INTO computation (digest, described) VALUES (?, ?)", row
            )
            asked = "SELECT id FROM computation WHERE digest = ?"
            return int(self._database.execute(asked, (computation.digest,)).fetchone()[0])

    def counts(self) -> dict[int, int]:
        """Return how many results of each computation there are."""
        with self._telling():
            return dict(
                self._database.execute(
                    "SELECT computation, count(*) FROM result GROUP BY computation"
                ).fetchall()
            )

    def described(self, computation: int) -> str:
        """Return what identifies a computation, as JSON."""
        with self._telling():
            asked = "SELECT described FROM computation WHERE id = ?"
            return str(self._database.execute(asked, (computation,)).fetchone()[0])

    def codes(self, computation: int) -> list[str]:
        """Return the codes that computed results of a computation."""
        with self._telling():
            asked = "SELECT code FROM computation WHERE id = ?"
            return [
                str(code)
                for code in json.loads(self._database.execute(asked, (computation,)).fetchone()[0])
            ]

    def add_code(self, computation: int, code: str) -> None:
        """Note a code that computes results of a computation from here on."""
        with self._transaction():
            if code not in (codes := self.codes(computation)):
                row = (json.dumps([*codes, code]), computation)
                self._database.execute("UPDATE computation SET code = ? WHERE id = ?", row)

    def find(self, computation: int, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the rows of those results of a computation that are there."""
        found: dict[Key, int] = {}
        with self._telling():
            for start in range(0, len(keys), ASKED_AT_ONCE):
                part = keys[start : start + ASKED_AT_ONCE]
                items = {item for item, _ in part}
                occurrences = [occurrence for _, occurrence in part]
                places = ",".join("?" * len(items))
                rows = self._database.execute(
                    _FIND.format(places), (computation, *items, min(occurrences), max(occurrences))
                )
                found.update(((item, occurrence), row) for item, occurrence, row in rows)
        return found

    def after(self, computation: int, row: int, most: int) -> list[tuple[int, bytes, int]]:
        """Return the next results of a computation as they were stored: row, item, occurrence."""
        with self._telling():
            asked = (
                "SELECT id, item, occurrence FROM result NOT INDEXED WHERE id > ? AND computation "
                "= ? ORDER BY id LIMIT ?"
            )
            return self._database.execute(asked, (row, computation, most)).fetchall()

    def put(self, computation: int, results: Sequence[tuple[Key, str, bytes]]) -> list[int]:
        """Store results (key, form, content), all of them or none, and return their rows; one that
        is there already stays.
        """
        run = self._database.execute
        many = self._database.executemany
        with self._transaction():
            first = 1 + run("SELECT coalesce(max(id), 0) FROM result").fetchone()[0]
            rows = list(range(first, first + len(results)))
            put = many(
                "INSERT INTO result (id, computation, item, occurrence) VALUES (?, ?, ?, ?) ON "
                "CONFLICT DO NOTHING",
                [(row, computation, *key) for row, (key, _, _) in zip(rows, results, strict=True)],
            )
            new = set(rows)
            if put.rowcount != len(
                results
            ):  # somebody stored one without a claim: the lock file was deleted
                found = self.find(computation, [key for key, _, _ in results])
                rows = [found[key] for key, _, _ in results]
            many(
                "INSERT OR REPLACE INTO value (id, form, crc32, content) VALUES (?, ?, ?, ?)",
                [
                    (row, form, zlib.crc32(content), content)
                    for row, (_, form, content) in zip(rows, results, strict=True)
                    if row in new
                ],
            )
        return rows

    def fail(
        self, computation: int, key: Key, failed_at: float, error: str, *, never_fits: bool
    ) -> None:
        """Note that an item failed; the next call tries it again."""
        with self._transaction():
            row = (computation, *key, failed_at, never_fits, error)
            self._database.execute("INSERT OR REPLACE INTO failure VALUES (?, ?, ?, ?, ?, ?)", row)

    def failures(self, computation: int, since: float) -> dict[Key, tuple[bool, str]]:
        """Return what failed since a time (Unix seconds): whether it never fits, and its error."""
        with self._telling():
            asked = (
                "SELECT item, occurrence, never_fits, error FROM failure WHERE computation = ? AND "
                "failed_at >= ?"
            )
            rows = self._database.execute(asked, (computation, since))
            return {
                (item, occurrence): (bool(never_fits), error)
                for item, occurrence, never_fits, error in rows
            }

    def values(self, rows: Iterable[int]) -> dict[int, tuple[str, bytes]]:
        """Return form and content of results by their rows."""
        found: dict[int, tuple[str, bytes]] = {}
        asked = "SELECT id, form, crc32, content FROM value WHERE id IN ({})"
        wanted = list(rows)
        with self._telling():
            for start in range(0, len(wanted), ASKED_AT_ONCE):
                part = wanted[start : start + ASKED_AT_ONCE]
                for row, form, crc32, content in self._database.execute(
                    asked.format(",".join("?" * len(part))), part
                ):
                    if not isinstance(content, bytes) or zlib.crc32(content) != crc32:
                        raise self._damaged(row)
                    found[row] = form, content
        gone = set(wanted) - found.keys()
        if gone:
            raise self._damaged(min(gone))
        return found

    def _damaged(self, row: int) -> StoreError:
        command = f"DELETE FROM result WHERE id = {row}"  # noqa: S608 - to be pasted
        hint = f"sqlite3 {self.path} '{command}'; the next call of map computes that item again"
        return StoreError(
            f"{self.path}: result {row} is damaged: it is not what was stored", hint=hint
        )

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._telling():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(
                    sqlite3.Error
                ):  # SQLite has rolled it back by itself where the disk is full
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Raise what SQLite raises as an error that says what to do."""
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            told = _told(error)
            raise StoreError(
                f"{self.path}: {told['what']} ({error})",
                hint=told["hint"].replace("PATH", str(self.path)),
            ) from None


def _told(error: Exception) -> Mapping[str, Any]:
    name = getattr(error, "sqlite_errorname", None) or ""
    if isinstance(error, (sqlite3.DataError, OverflowError)):
        name = "SQLITE_TOOBIG"
    found: Mapping[str, Any] = next(
        entry for entry in store_data()["error"] if name.startswith(entry["name"])
    )
    return found


# Where the results of items are in the store.
#
# A call stores results in the order of its items, so those of the next items are most likely the
# next in the store: read in their order they cost a quarter of what looking each one up costs,
# which is what is left where the order is another one.

# So many results are read ahead, by the items that are asked for: several workers store their
# batches in turn.
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
        count: how many results there were when the call began; those that come later are found when
            an item is claimed.
    """

    def __init__(self, store: ResultStore, computation: int, count: int) -> None:
        self._store = store
        self._computation = computation
        self._left = count
        self._is_in_order = count > 0
        self._last_row = 0
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
        if missing:
            return found | self._store.find(self._computation, missing)
        return found

    def _read_ahead(self, wanted: int) -> None:
        if self._left and len(self._ahead) < wanted:
            new = self._store.after(self._computation, self._last_row, max(wanted, _LEAST_AHEAD))
            self._ahead.update(((item, occurrence), row) for row, item, occurrence in new)
            if new:
                self._left = max(0, self._left - len(new))
            else:
                self._left = 0
            if new:
                self._last_row = new[-1][0]
