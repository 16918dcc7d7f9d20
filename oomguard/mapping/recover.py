"""Recover readable results of a damaged store: ``python -m oomguard.mapping.recover DAMAGED NEW``.

SQLite finds a row by its number if all pages on the way are intact. That also works in a truncated
file once its header no longer contains the length. A result is saved if its content matches its
checksum. The ``.recover`` command of the sqlite3 program may be missing, as on Debian 12.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from oomguard.core.errors import StoreError, UsageError
from oomguard.mapping.computation import Computation
from oomguard.mapping.store import Claims, Key, ResultStore

_AT_ONCE: Final = 500
# Offset of the number of pages in the header. If it is 0, SQLite uses the size of the file
# (https://www.sqlite.org/fileformat2.html).
_PAGES_AT: Final = 28
# A store cannot have more rows than bytes.
_LEAST_ROW_BYTES: Final = 8
Value = tuple[int, str, bytes]
"""A result's row, form and content."""


def recover(damaged: Path, new: Path) -> int:
    """Save every readable result in a new store; return their number.

    The damaged store is not changed.

    Raises:
        StoreError: nothing is readable, or the new store cannot be written.
        UsageError: the new path already exists.
    """
    if new.exists():
        raise UsageError(f"{new} already exists", hint="name a new file")
    try:
        with tempfile.TemporaryDirectory(
            dir=new.absolute().parent, prefix=f".{new.name}."
        ) as folder:
            copy = Path(folder) / "damaged.sqlite"
            _copy(damaged, copy)
            with closing(sqlite3.connect(copy)) as database:
                # Texts may be damaged too.
                database.text_factory = bytes
                return _saved(database, copy.stat().st_size // _LEAST_ROW_BYTES, new)
    except OSError as error:
        hint = "name a store, and a new file in a folder with room for a copy"
        raise StoreError(f"{error.filename or damaged}: {error.strerror}", hint=hint) from None
    except sqlite3.Error as error:
        hint = "a map with another store computes the results again"
        raise StoreError(f"{damaged}: nothing is readable ({error})", hint=hint) from None


def _copy(damaged: Path, copy: Path) -> None:
    shutil.copyfile(damaged, copy)
    # Newer pages are still in the write-ahead log.
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(
            damaged.with_name(f"{damaged.name}-wal"), copy.with_name(f"{copy.name}-wal")
        )
    with copy.open("r+b") as file:
        file.seek(_PAGES_AT)
        file.write(bytes(4))


def _saved(database: sqlite3.Connection, last: int, new: Path) -> int:
    known = {number: (of, codes) for number, of, codes in _computations(database)}
    count = 0
    with closing(Claims(new)) as claims, closing(ResultStore(new, claims)) as store:
        numbers = {}
        for number, (computation, codes) in known.items():
            numbers[number] = store.number(computation)
            for code in codes:
                store.add_code(numbers[number], code)
        # Written in groups, because a commit for each result would take a disk write each.
        waiting: dict[int, list[tuple[Key, str, bytes]]] = defaultdict(list)
        for row, form, content in _values(database, last):
            if (found := _key(database, row)) is None or found[0] not in numbers:
                continue
            number = numbers[found[0]]
            waiting[number].append((found[1], form, content))
            count += 1
            if len(waiting[number]) == _AT_ONCE:
                store.put(number, waiting.pop(number))
                waiting[number] = []
        for number, rest in waiting.items():
            store.put(number, rest)
    return count


def _computations(database: sqlite3.Connection) -> Iterator[tuple[int, Computation, list[str]]]:
    for number, digest, described, codes in database.execute(
        "SELECT id, digest, described, code FROM computation"
    ):
        with contextlib.suppress(ValueError, AttributeError):
            # Damaged, so its results have no known identity.
            yield (
                number,
                Computation(digest, described.decode(), ""),
                [str(code) for code in json.loads(codes)],
            )


def _values(database: sqlite3.Connection, last: int) -> Iterator[Value]:
    """Yield the intact results, skipping every unreadable page."""
    asked = "SELECT id, form, crc32, content FROM value WHERE id > ? ORDER BY id"
    after = 0
    while True:
        try:
            for row, form, crc32, content in database.execute(asked, (after,)):
                if (
                    isinstance(content, bytes)
                    and isinstance(form, bytes)
                    and zlib.crc32(content) == crc32
                ):
                    after = row
                    yield row, form.decode("ascii", "replace"), content
        except sqlite3.DatabaseError:
            behind = _behind(database, after, last)
            if behind is None:
                return
            after = behind
        else:
            return


def _behind(database: sqlite3.Connection, after: int, last: int) -> int | None:
    """Return a row number after which rows are readable again, or None; found by bisection."""
    failing = after
    step = 1
    while not _can_be_read(database, failing + step):
        failing += step
        if failing > last:
            return None
        step *= 2
    readable = failing + step
    while readable - failing > 1:
        middle = (readable + failing) // 2
        if _can_be_read(database, middle):
            readable = middle
        else:
            failing = middle
    return readable


def _can_be_read(database: sqlite3.Connection, after: int) -> bool:
    """Return whether the next row is readable, or there is none."""
    with contextlib.suppress(sqlite3.DatabaseError):
        database.execute(
            "SELECT id, content FROM value WHERE id > ? ORDER BY id LIMIT 1", (after,)
        ).fetchall()
        return True
    return False


def _key(database: sqlite3.Connection, row: int) -> tuple[int, Key] | None:
    """Return the computation of a result and its item and occurrence, or None if unreadable."""
    asked: list[Any] = []
    with contextlib.suppress(sqlite3.DatabaseError):
        asked = database.execute(
            "SELECT computation, item, occurrence FROM result WHERE id = ?", (row,)
        ).fetchall()
    for computation, item, occurrence in asked:
        if isinstance(item, bytes) and isinstance(occurrence, int):
            return computation, (item, occurrence)
    return None


@click.command()
@click.argument("damaged", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
def main(damaged: Path, new: Path) -> None:
    """Save every readable result of the store DAMAGED in the store NEW."""
    try:
        count = recover(damaged, new)
    except UsageError as error:
        raise click.ClickException(f"{error}\n  {error.hint}") from None
    click.echo(
        f'results saved: {count:,}; continue with store="{new}", which computes the missing ones'
    )


if __name__ == "__main__":
    main(prog_name="python -m oomguard.mapping.recover")
