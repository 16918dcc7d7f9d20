"""Files of any run's journal are known by what they are."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oomguard.journal.file_of_a_journal import is_of_a_journal
from oomguard.journal.store import Journal

OLD = Path(__file__).with_name("schema_1.sqlite3")


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_a_journal_of_any_schema_and_what_sqlite_has_beside_it_is_one(tmp_path: Path, end: str):
    Journal(tmp_path / "new name")
    shutil.copy(OLD, tmp_path / "old")
    assert is_of_a_journal(f"{tmp_path / 'new name'}{end}")
    assert is_of_a_journal(f"{tmp_path / 'old'}{end}")


def test_a_journal_in_which_somebody_writes_is_one_and_stays_as_it_is(tmp_path: Path):
    Journal(path := tmp_path / "j")
    before = path.read_bytes()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert is_of_a_journal(str(path))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["j"]


@pytest.mark.parametrize("name", ["other", "text", "empty", "missing", "other-wal"])
def test_any_other_file_is_none(tmp_path: Path, name: str):
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE attempt (session, note)")
        other.commit()
    (tmp_path / "text").write_text("SQLite format 3")
    (tmp_path / "empty").touch()
    assert not is_of_a_journal(str(tmp_path / name))


def test_what_waits_for_a_server_is_known_by_its_place(tmp_path: Path):
    assert is_of_a_journal(str(tmp_path / "oomguard" / "undelivered" / "team-0123" / "s.jsonl"))
    assert not is_of_a_journal(str(tmp_path / "results" / "s.jsonl"))
