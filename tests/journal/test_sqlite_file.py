"""A journal's file without SQLAlchemy: what stands compiled is what the tables and statements compile to, and a run loads nothing else."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from oomguard.errors import JournalError
from oomguard.journal.schema import prepare
from oomguard.journal.sqlite_file import prepare_file, reads, writes
from oomguard.journal.store import Journal, Record

ROOT = Path(__file__).parents[2]
LOADED = """
import sys
from pathlib import Path
from oomguard.journal.store import Journal, Ran, Record
journal = Journal(Path(sys.argv[1]))
row = journal.begin(Record("s", 1, ["x"], {}, []))
journal.end(row, exit_status=1, incident={"kind": "cuda_oom"}, measured={}, ran=Ran("vllm"))
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_statements_are_those_that_the_tables_compile_to_today():
    command = [sys.executable, str(ROOT / "scripts" / "journal_statements.py"), "--check"]
    assert subprocess.run(command, check=False, capture_output=True, text=True).stderr == ""


def test_a_new_file_is_the_one_that_sqlalchemy_makes(tmp_path: Path):
    def described(path: Path) -> dict[str, object]:
        with contextlib.closing(sqlite3.connect(path)) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master ORDER BY name")]
            told = {name: database.execute(f"PRAGMA table_info({name})").fetchall() for name in names}
            versions = database.execute("SELECT * FROM alembic_version").fetchall()
            return {**told, "versions": versions, "user": database.execute("PRAGMA user_version").fetchall()}

    Journal(tmp_path / "ours")
    with create_engine(f"sqlite:///{tmp_path / 'theirs'}").begin() as connection:
        prepare(connection)

    assert described(tmp_path / "ours") == described(tmp_path / "theirs")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_write_loads_no_sqlalchemy_into_a_new_file_and_into_one_that_is_there(tmp_path: Path, is_there: bool):
    if is_there:
        Journal(tmp_path / "j")
    command = [sys.executable, "-c", LOADED, str(tmp_path / "j")]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())

    assert "sqlite3" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "psycopg"}


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path):
    journal = Journal(tmp_path / "j")
    journal.begin(Record("s", 1, ["x"], {}, []))
    with pytest.raises(JournalError, match="no such table: other"), writes(journal.path, 1.0) as database:
        database.execute("DELETE FROM attempt")
        database.execute("DELETE FROM other")

    assert len(journal.records()) == 1


def test_reading_permits_no_writing(tmp_path: Path):
    journal = Journal(tmp_path / "j")
    with pytest.raises(JournalError, match="readonly"), reads(journal.path, 1.0) as database:
        database.execute("DELETE FROM attempt")


def test_a_file_that_others_hold_is_waited_for_no_longer_than_asked(tmp_path: Path):
    journal = Journal(tmp_path / "j", busy_s=0.05)
    with contextlib.closing(sqlite3.connect(journal.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalError, match="locked"):
            journal.begin(Record("s", 1, ["x"], {}, []))


def test_an_older_file_is_migrated_once(tmp_path: Path):
    path = Path(shutil.copy(Path(__file__).with_name("schema_1.sqlite3"), tmp_path / "j"))
    prepare_file(path, 1.0)
    before = path.read_bytes()
    prepare_file(path, 1.0)

    assert path.read_bytes() == before
