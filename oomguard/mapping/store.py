"""Store the results of ``map`` in one SQLite file, by computation, item and occurrence.

The journal mode is WAL with ``synchronous`` NORMAL. Committed data survives any crash of the
process. A power loss may lose the last seconds, but the file stays valid. On a network folder
SQLite's shared memory does not work, so the rollback journal is used and each commit waits for the
disk (https://www.sqlite.org/wal.html).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import functools
import json
import os
import sqlite3
import struct
import sys
import tomllib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import StoreError, UsageError
from oomguard.core.installation import install_hint, upgrade_hint
from oomguard.mapping.computation import Computation
from oomguard.probe import torch_memory

# The first byte is the lock for opening the store; claims use the bytes after it.
_OPENING: Final = 0
_PLACES: Final = 2**62
# An odd number near the golden ratio of the range spreads the computations' bytes of one item.
_STEP: Final = 0x27220A9513FE7D8B
_TAKEN: Final = frozenset({errno.EAGAIN, errno.EACCES})
_open: Final[weakref.WeakSet[Claims]] = weakref.WeakSet()


class Claims:
    """Hold the claims of one call of ``map``; closing releases all of them.

    Args:
        store: the store. The lock file is next to it, with ``.lock`` added to its name.

    Raises:
        StoreError: the lock file cannot be created, or its file system does not support locks.
    """

    def __init__(self, store: Path) -> None:
        self._path = store.with_name(f"{store.name}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._is_new = True
        try:
            try:
                self._file: int | None = os.open(self._path, flags | os.O_EXCL, 0o600)
            except FileExistsError:
                self._file = os.open(self._path, flags, 0o600)
                self._is_new = False
        except OSError as error:
            raise self._cannot(error) from None
        _open.add(self)

    def take(self, computation: int, item: bytes, occurrence: int) -> bool:
        """Claim an item of a computation; return False if another call has it."""
        try:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, _place(computation, item, occurrence))
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            raise self._cannot(error) from None
        return True

    def give_back(self, computation: int, item: bytes, occurrence: int) -> None:
        """Release an item."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _place(computation, item, occurrence))

    def give_back_all(self) -> None:
        """Release all items."""
        self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _OPENING + 1, length=0)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Wait until no other call opens the store.

        Creating the store and changing its journal mode must not happen in two calls at once.
        """
        try:
            self._lock(fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _OPENING)
        except OSError as error:
            raise self._cannot(error) from None
        try:
            yield
        finally:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _OPENING)

    def remove_new(self) -> None:
        """Remove the lock file if this call created it, because its path is not a valid store."""
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release everything."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _lock(self, command: int, kind: int, place: int, length: int = 1) -> None:
        if self._file is not None:
            # struct flock: l_type, l_whence, l_start, l_len (0 means to the end), l_pid, with
            # native alignment.
            fcntl.fcntl(
                self._file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, place, length, 0)
            )

    def _cannot(self, error: OSError) -> StoreError:
        hint = "give a path in a folder on a local disk: store=PATH"
        return StoreError(
            f"{self._path}: {error.strerror}: oomguard cannot coordinate workers there", hint=hint
        )


def _place(computation: int, item: bytes, occurrence: int) -> int:
    """Return the byte of an item; items that share one only wait for each other."""
    return 1 + (int.from_bytes(item[:8], "little") + computation * _STEP + occurrence) % _PLACES


def _close_in_child() -> None:
    """Close the files in a forked child, which would otherwise keep the items claimed."""
    for claims in list(_open):
        claims.close()


os.register_at_fork(after_in_child=_close_in_child)


# Find out which file system holds a path, and whether other machines may have mounted it.

MOUNTS: Final = Path("/proc/self/mountinfo")


@functools.cache
def store_data() -> dict[str, Any]:
    """Return the content of store.toml."""
    return tomllib.loads(Path(__file__).with_name("store.toml").read_text(encoding="utf-8"))


def network_file_system(path: Path) -> str | None:
    """Return the type of a network file system, or None for a local or unknown one."""
    kind = _file_system(path)
    if kind in store_data()["network_file_systems"]:
        return kind
    return None


def _file_system(path: Path) -> str | None:
    """Return the type of the file system mounted deepest above a path (proc_pid_mountinfo(5))."""
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
        # If two file systems are mounted on one folder, the later one is visible.
        if place.is_relative_to(mounted) and len(mounted.parts) >= deepest:
            deepest = len(mounted.parts)
            kind = rest.split(" ")[0]
    return kind


SCHEMA_VERSION: Final = 1
# "oogm" in ASCII distinguishes a store from other SQLite files.
APPLICATION_ID: Final = 0x6F6F676D
_BUSY_S: Final = 60.0
# Pages of the write-ahead log (32 MiB) before SQLite copies them into the file, which waits for the
# disk. SQLite's default is 1,000 pages.
_CHECKPOINT_PAGES: Final = 8192
# Values in one query: SQLite before 3.32 allows only 999.
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
    """Hold one call's connection to a store; several calls and processes may use one store.

    Args:
        path: the file, which is created if it does not exist.
        claims: the locks that protect opening the store. None: the store exists and is only read.

    Raises:
        StoreError: the file is not a store, is damaged, full or read-only, or a newer oomguard
            wrote it. All methods raise it too.
    """

    def __init__(self, path: Path, claims: Claims | None = None) -> None:
        self.path = path
        self.network = network_file_system(path)
        with self._explaining(), nullcontext() if claims is None else claims.opening():
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
        # Any program may use user_version, so the application's id decides whether the file is
        # ours.
        (version,) = run("PRAGMA user_version").fetchone()
        (application,) = run("PRAGMA application_id").fetchone()
        if version > SCHEMA_VERSION and application == APPLICATION_ID:
            what = (
                f"a newer oomguard wrote it (schema {version}, this version supports "
                f"{SCHEMA_VERSION})"
            )
            raise StoreError(
                f"{self.path}: {what}", hint=f"{upgrade_hint()}; or give another path: store=PATH"
            )
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and not is_new:
            raise StoreError(
                f"{self.path} is the database of another program",
                hint="give another path: store=PATH; the file is unchanged",
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
        """Return the number of a computation, adding a new one."""
        with self._explaining():
            row = (computation.digest, computation.described)
            self._database.execute(
                "INSERT OR IGNORE INTO computation (digest, described) VALUES (?, ?)", row
            )
            asked = "SELECT id FROM computation WHERE digest = ?"
            return int(self._database.execute(asked, (computation.digest,)).fetchone()[0])

    def counts(self) -> dict[int, int]:
        """Return the number of results of each computation."""
        with self._explaining():
            return dict(
                self._database.execute(
                    "SELECT computation, count(*) FROM result GROUP BY computation"
                ).fetchall()
            )

    def described(self, computation: int) -> str:
        """Return the description of a computation, as JSON."""
        with self._explaining():
            asked = "SELECT described FROM computation WHERE id = ?"
            return str(self._database.execute(asked, (computation,)).fetchone()[0])

    def codes(self, computation: int) -> list[str]:
        """Return all versions of the code that computed results of a computation."""
        with self._explaining():
            asked = "SELECT code FROM computation WHERE id = ?"
            (codes,) = self._database.execute(asked, (computation,)).fetchone()
            return [str(code) for code in json.loads(codes)]

    def add_code(self, computation: int, code: str) -> None:
        """Add a version of the code of a computation."""
        with self._transaction():
            if code not in (codes := self.codes(computation)):
                row = (json.dumps([*codes, code]), computation)
                self._database.execute("UPDATE computation SET code = ? WHERE id = ?", row)

    def find(self, computation: int, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the rows of the existing results among these keys."""
        found: dict[Key, int] = {}
        with self._explaining():
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
        """Return the next results of a computation in storage order: row, item, occurrence."""
        with self._explaining():
            asked = (
                "SELECT id, item, occurrence FROM result NOT INDEXED WHERE id > ? AND computation "
                "= ? ORDER BY id LIMIT ?"
            )
            return self._database.execute(asked, (row, computation, most)).fetchall()

    def put(self, computation: int, results: Sequence[tuple[Key, str, bytes]]) -> list[int]:
        """Store all these results (key, form, content) or none, and return their rows.

        An existing result is kept.
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
            if put.rowcount != len(results):
                # Another worker stored one without a claim, because someone deleted the lock file.
                found = self.find(computation, [key for key, _, _ in results])
                rows = [found[key] for key, _, _ in results]
            values = []
            for row, (_, form, content) in zip(rows, results, strict=True):
                if row in new:
                    values.append((row, form, zlib.crc32(content), content))
            many(
                "INSERT OR REPLACE INTO value (id, form, crc32, content) VALUES (?, ?, ?, ?)",
                values,
            )
        return rows

    def fail(
        self, computation: int, key: Key, failed_at: float, error: str, *, never_fits: bool
    ) -> None:
        """Record that an item failed; the next call tries it again."""
        with self._transaction():
            row = (computation, *key, failed_at, never_fits, error)
            self._database.execute("INSERT OR REPLACE INTO failure VALUES (?, ?, ?, ?, ?, ?)", row)

    def failures(self, computation: int, since: float) -> dict[Key, tuple[bool, str]]:
        """Return the failures since a time in Unix seconds: whether it never fits, and
        the error.
        """
        with self._explaining():
            asked = (
                "SELECT item, occurrence, never_fits, error FROM failure WHERE computation = ? AND "
                "failed_at >= ?"
            )
            rows = self._database.execute(asked, (computation, since))
            found = {}
            for item, occurrence, never_fits, error in rows:
                found[(item, occurrence)] = (bool(never_fits), error)
            return found

    def values(self, rows: Iterable[int]) -> dict[int, tuple[str, bytes]]:
        """Return the form and content of results by their rows."""
        found: dict[int, tuple[str, bytes]] = {}
        asked = "SELECT id, form, crc32, content FROM value WHERE id IN ({})"
        wanted = list(rows)
        with self._explaining():
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
            f"{self.path}: result {row} is damaged: its checksum does not match", hint=hint
        )

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explaining():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    # SQLite has already rolled back if the disk is full.
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Convert SQLite's errors to errors that say what to do."""
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            entry = _error_entry(error)
            raise StoreError(
                f"{self.path}: {entry['what']} ({error})",
                hint=entry["hint"].replace("PATH", str(self.path)),
            ) from None


def _error_entry(error: Exception) -> Mapping[str, Any]:
    name = getattr(error, "sqlite_errorname", None) or ""
    if isinstance(error, (sqlite3.DataError, OverflowError)):
        name = "SQLITE_TOOBIG"
    entries: list[Mapping[str, Any]] = store_data()["error"]
    return next(filter(lambda entry: name.startswith(entry["name"]), entries))


# A call stores results in the order of its items, so the next items' results are probably the next
# rows. Reading rows in order costs a quarter of single lookups. Single lookups are used if the
# order differs.

# Read ahead this many results for each requested item, because several workers store batches in
# turn.
_AHEAD_RATIO: Final = 4
# Read ahead at least this many, because a generator requests few items at a time.
_LEAST_AHEAD: Final = 800
# If fewer than this share of the rows were requested, the order differs.
_LEAST_RATIO: Final = 0.5


class FinishedResults:
    """Find the results that a computation has in the store.

    Args:
        store: the store.
        computation: the number of the computation.
        count: the number of results at the start of the call. Later results are found when an item
            is claimed.
    """

    def __init__(self, store: ResultStore, computation: int, count: int) -> None:
        self._store = store
        self._computation = computation
        self._left = count
        self._is_in_order = count > 0
        self._last_row = 0
        self._ahead: dict[Key, int] = {}

    def rows(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Return the rows of the existing results."""
        if not self._left and not self._ahead:
            return {}
        found: dict[Key, int] = {}
        if self._is_in_order:
            self._read_ahead(_AHEAD_RATIO * len(keys))
            pop = self._ahead.pop
            found = {}
            for key in keys:
                row = pop(key, 0)
                if row:
                    found[key] = row
            self._is_in_order = len(found) >= _LEAST_RATIO * len(keys)
        missing = []
        for key in keys:
            if key not in found:
                missing.append(key)
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


_JSON = "json"
_BYTES = "bytes"
_TREE = "tree"
_TORCH = "torch"
_NUMPY = "numpy"
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_METADATA: Final = "oomguard"
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _NotStorableError(TypeError):
    """Report a value whose type cannot be stored; the message is the type."""


class Codec:
    """Convert the results of one call to bytes and back.

    Args:
        encode: converts a result to something that can be stored. None: store it as it is.
        decode: reverses ``encode``.
    """

    def __init__(
        self, encode: Callable[[Any], Any] | None, decode: Callable[[Any], Any] | None
    ) -> None:
        self._encode = encode
        self._decode = decode

    def written(self, value: Any, place: str) -> tuple[str, bytes]:
        """Return the storage form of a result, and its bytes.

        Raises:
            UsageError: its type cannot be stored. The message contains the type and ``place``.
        """
        if self._encode is None:
            shown = value
        else:
            shown = self._encode(value)
        try:
            return _written(shown)
        except _NotStorableError as error:
            hint = (
                "encode=FUNCTION must convert it to JSON, bytes, tensors or arrays; "
                "decode=FUNCTION reverses that"
            )
            raise UsageError(
                f"the result of {place} cannot be stored because it contains a {error}", hint=hint
            ) from None

    def read(self, form: str, content: bytes) -> Any:
        """Return a stored result; raise ValueError or KeyError for invalid bytes."""
        value = _read(form, content)
        if self._decode is None:
            return value
        return self._decode(value)


def _written(value: Any) -> tuple[str, bytes]:
    if type(value) is bytes:
        return _BYTES, value
    if _is_plain(value):
        return _JSON, _text(value)
    tensors: dict[str, Any] = {}
    tree = _tree(value, tensors)
    if not tensors:
        return _TREE, _text(tree)
    metadata = {_METADATA: json.dumps(tree)}
    is_torch = any(hasattr(tensor, "untyped_storage") for tensor in tensors.values())
    save = _safetensors(_TORCH if is_torch else _NUMPY).save
    if is_torch:
        import torch

        tensors = {
            name: t if hasattr(t, "untyped_storage") else torch.from_numpy(t)
            for name, t in tensors.items()
        }
    with torch_memory.on_host():
        return (_TORCH if is_torch else _NUMPY), save(tensors, metadata)


def _read(form: str, content: bytes) -> Any:
    if form == _BYTES:
        return content
    if form == _JSON:
        return json.loads(content)
    if form == _TREE:
        return _grown(json.loads(content), {})
    # A safetensors file begins with 8 bytes for the header's length, then the header as JSON.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    with torch_memory.on_host():
        return _grown(
            json.loads(header["__metadata__"][_METADATA]), _safetensors(form).load(content)
        )


def _is_plain(value: Any) -> bool:
    """Return whether JSON gives back the same value with the same types."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is list:
        return all(map(_is_plain, value))
    return (
        kind is dict
        and all(type(key) is str for key in value)
        and all(map(_is_plain, value.values()))
    )


def _tree(value: Any, tensors: dict[str, Any]) -> Any:
    """Return a value as JSON, with each other object replaced by ``[its kind, its parts]``."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [kind.__name__, [_tree(entry, tensors) for entry in value]]
    if kind is dict:
        return [
            "dict",
            [[_tree(key, tensors), _tree(entry, tensors)] for key, entry in value.items()],
        ]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode("ascii")]
    name = str(len(tensors))
    if hasattr(value, "untyped_storage"):
        tensors[name] = _host(value)
        return ["tensor", name]
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        import numpy as np

        if value.dtype.kind not in "biuf" or (kind is not np.ndarray and value.shape):
            raise _NotStorableError(f"numpy.{kind.__name__} of {value.dtype}")
        tensors[name] = np.array(value, order="C")
        return ["array" if kind is np.ndarray else "number", name]
    raise _NotStorableError(
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _grown(tree: Any, tensors: dict[str, Any]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, made_of = tree
    if kind in ("list", "tuple"):
        entries = [_grown(entry, tensors) for entry in made_of]
        if kind == "tuple":
            return tuple(entries)
        return entries
    if kind == "dict":
        return {_grown(key, tensors): _grown(entry, tensors) for key, entry in made_of}
    if kind == "bytes":
        return base64.b64decode(made_of)
    tensor = tensors[made_of]
    if kind == "tensor":
        return tensor
    if hasattr(tensor, "untyped_storage"):
        array = tensor.numpy()
    else:
        array = tensor
    if kind == "array":
        return array
    return array[()]


def _host(tensor: Any) -> Any:
    """Return a tensor on the CPU without its graph, copied if it is a view."""
    import torch

    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or not isinstance(tensor, torch.Tensor)
    ):
        raise _NotStorableError(f"tensor of layout {tensor.layout}")
    with torch_memory.on_host():
        return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def _text(value: Any) -> bytes:
    return _encode(value).encode("utf-8", "surrogatepass")


def _safetensors(form: str) -> Any:
    try:
        if form == _NUMPY:
            import safetensors.numpy

            return safetensors.numpy
        import safetensors.torch

        return sys.modules["safetensors.torch"]
    except ImportError:
        hint = install_hint("hf")
        raise UsageError(
            "tensors are stored as safetensors, which is not installed", hint=hint
        ) from None
