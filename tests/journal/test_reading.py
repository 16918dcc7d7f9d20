"""A journal is read without changing it, and what is no journal of ours is one clear message."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from oomguard.errors import InputError
from oomguard.installation import upgrade_hint
from oomguard.journal.reading import reading
from oomguard.journal.runs import Asked, past_runs
from oomguard.journal.store import Journal, Record, default_path
from oomguard.journal.tables import RUN

OLD = Path(__file__).with_name("schema_1.sqlite3")


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught, reading(path, busy_s=0.05) as database:
        assert database is not None
        past_runs(database, Asked())
    return caught.value


def test_a_journal_of_schema_1_is_read_and_stays_as_it_is(tmp_path: Path):
    path = Path(shutil.copy(OLD, tmp_path / "old.sqlite3"))
    content = path.read_bytes()
    with reading(path) as database:
        runs = past_runs(database, Asked())

    assert [(run.number, run.result) for run in runs] == [(4, "failed"), (3, "failed"), (2, "ran"), (1, "repaired")]
    assert path.read_bytes() == content


def test_no_journal_of_ones_own_is_no_mistake_and_none_is_made():
    with reading() as database:
        assert database is None
    assert not default_path().parent.exists()


def test_an_empty_file_has_no_runs(tmp_path: Path):
    (tmp_path / "empty").touch()
    with reading(tmp_path / "empty") as database:
        assert past_runs(database, Asked()) == []


def test_reading_permits_no_writing(tmp_path: Path):
    Journal(tmp_path / "j")
    with reading(tmp_path / "j") as database, pytest.raises(OperationalError, match="readonly"):
        database.execute(RUN.delete())


@pytest.mark.parametrize(
    ("kind", "words", "hint"),
    [
        ("missing", "No such file", "--journal PATH"),
        ("folder", "is a folder", "--journal PATH"),
        ("fifo", "is a FIFO", "--journal PATH"),
        ("text", "file is not a database", "--journal PATH"),
        ("other", "another program", "--journal PATH"),
        ("newer", "a newer oomguard (schema 99", upgrade_hint()),
        ("cut", "malformed", "mv "),
        ("record", "no JSON", "mv "),
    ],
)
def test_what_is_no_journal_is_told_with_a_way_out(tmp_path: Path, kind: str, words: str, hint: str):
    path = tmp_path / "it is"
    journal = Journal(tmp_path / "whole")
    for i in range(200):
        journal.begin(Record(f"s{i}", 1, ["x" * 200], {}, []))
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("dear diary, " * 200)
    elif kind == "cut":
        content = journal.path.read_bytes()
        path.write_bytes(content[:8192] + b"\x55" * (len(content) - 8192))
    elif kind != "missing":
        shutil.copy(journal.path, path)
        with contextlib.closing(sqlite3.connect(path)) as database:
            if kind == "other":
                database.executescript("DROP TABLE attempt; PRAGMA user_version = 0")
            elif kind == "newer":
                database.execute("PRAGMA user_version = 99")
            else:
                database.execute("UPDATE attempt SET settings = '{'")
            database.commit()

    error = refusal(path)

    assert str(path) in str(error)
    assert words in str(error)
    assert hint in str(error.hint)


def test_a_journal_that_is_locked_is_told_and_not_waited_for_without_end(tmp_path: Path):
    Journal(tmp_path / "j")
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        error = refusal(tmp_path / "j")

    assert "locked" in str(error)
    assert "another program holds it" in str(error.hint)
