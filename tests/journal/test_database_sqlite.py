"""A journal's file: written in one transaction, and migrated from every older schema without losing anything."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.core.errors import InputError, JournalError
from oomguard.core.installation import upgrade_hint
from oomguard.journal.database import SCHEMA_VERSION, migrations, open_file, prepare
from oomguard.journal.store import AttemptRow, Journal, RunIdentity

OLD = Path(__file__).with_name("schema_1.sqlite3")
OLD_COLUMNS = "id, session, number, started_at, ended_at, command, settings, patches, incident, predicted, measured, exit_status"
WRITE = """
import sys
from pathlib import Path
from oomguard.journal.store import Journal, RunIdentity, AttemptRow
journal = Journal(Path(sys.argv[1]))
begun = journal.begin(AttemptRow("s", 1, ["x"], {}, []))
journal.end(begun, exit_status=1, incident={"kind": "cuda_oom"}, measured={}, ran=RunIdentity("vllm"))
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "journal.sqlite3"))


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def older(path: Path, schema: int) -> Path:
    """Migrate a file of schema 1 up to another one."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        for number, script in migrations("sqlite", 1):
            if number <= schema:
                database.executescript(script)
        database.executescript(f"PRAGMA user_version = {schema}")
    return path


def test_migrations_lead_to_the_schema_of_this_version():
    assert [number for number, _ in migrations("sqlite", 0)] == list(range(1, SCHEMA_VERSION + 1))
    assert [number for number, _ in migrations("postgresql", 0)][-1] == SCHEMA_VERSION


def test_older_journal_keeps_every_attempt_and_its_runs(tmp_path: Path):
    before = ask(OLD, f"SELECT {OLD_COLUMNS} FROM attempt ORDER BY id")
    assert len(before) == 6
    for schema in range(1, SCHEMA_VERSION):
        path = older(Path(shutil.copy(OLD, tmp_path / f"schema-{schema}")), schema)
        Journal(path)
        assert ask(path, f"SELECT {OLD_COLUMNS} FROM attempt ORDER BY id") == before, schema
        assert ask(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)], schema
        runs = ask(
            path,
            "SELECT number, original, engine, engine_version, model, forgotten, who FROM run ORDER BY number",
        )
        assert [run[0] for run in runs] == [1, 2, 3, 4], schema
        assert runs[0][1] == '["python3", "./fake_engine.py", "--api-key", "***"]', schema
        assert [run[2:4] for run in runs] == [
            ("vllm", None),
            (None, None),
            ("vllm", None),
            ("vllm", "0.32.0"),
        ]
        assert {run[4:] for run in runs} == {(None, 0, None)}, schema


def test_an_old_journal_can_be_written(old: Path):
    journal = Journal(old)
    begun = journal.begin(
        AttemptRow(
            "new", 1, ["vllm", "--x"], {}, [], original=["vllm"], folder="/work", files="abc"
        )
    )
    journal.end(
        begun,
        exit_status=0,
        incident=None,
        measured={},
        ran=RunIdentity("vllm", "0.33.0", "./m", "H100"),
    )

    assert ask(old, "SELECT * FROM run WHERE number = 5") == [
        (
            5,
            "new",
            '["vllm"]',
            "/work",
            "abc",
            "vllm",
            "0.33.0",
            "./m",
            "H100",
            0,
            None,
            None,
            None,
            None,
        )
    ]


def test_older_running_version_writes_attempts_with_a_run(old: Path):
    Journal(old)
    with contextlib.closing(sqlite3.connect(old)) as database, database:
        database.execute(
            "INSERT INTO attempt (session, number, started_at, command, settings, patches, predicted, measured)"
            " VALUES ('old', 1, 1.0, '[\"x\"]', '{}', '[]', '{}', '{}')"
        )

    assert ask(old, "SELECT number, original FROM run WHERE session = 'old'") == [(5, '["x"]')]


def test_several_that_migrate_at_once_migrate_it_once(old: Path):
    code = "import sys, pathlib, oomguard.journal.store as store; store.Journal(pathlib.Path(sys.argv[1]))"
    openers = [subprocess.Popen([sys.executable, "-c", code, str(old)]) for _ in range(4)]

    assert [opener.wait(timeout=60) for opener in openers] == [0] * 4
    assert ask(old, "SELECT count(*) FROM run") == [(4,)]


def test_a_migration_that_fails_leaves_the_old_journal(old: Path):
    with contextlib.closing(sqlite3.connect(old)) as database:
        database.execute("ALTER TABLE attempt ADD COLUMN error")  # migration 4 adds it
    before = ask(old, "SELECT sql FROM sqlite_master")
    with pytest.raises(InputError, match="duplicate column name: error"):
        Journal(old)

    assert ask(old, "PRAGMA user_version") == [(1,)]
    assert ask(old, "SELECT sql FROM sqlite_master") == before


def test_a_file_is_migrated_once(old: Path):
    Journal(old)
    before = old.read_bytes()
    Journal(old)

    assert old.read_bytes() == before


def test_newer_journal_is_refused_with_both_versions(tmp_path: Path):
    Journal(tmp_path / "j")
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as database, database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(
        InputError, match=rf"schema {SCHEMA_VERSION + 1}, this one reads {SCHEMA_VERSION}\)"
    ) as caught:
        Journal(tmp_path / "j")
    assert upgrade_hint() in str(caught.value.hint)
    assert ask(tmp_path / "j", "PRAGMA user_version") == [(SCHEMA_VERSION + 1,)]


def test_a_database_of_another_program_is_left_alone(tmp_path: Path):
    path = tmp_path / "other.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (text)")
        database.commit()

    with pytest.raises(InputError, match="another program"):
        Journal(path)
    assert ask(path, "SELECT name FROM sqlite_master") == [("notes",)]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_write_loads_sqlite3_and_no_sql_toolkit(tmp_path: Path, is_there: bool):
    if is_there:
        shutil.copy(OLD, tmp_path / "j")
    command = [sys.executable, "-c", WRITE, str(tmp_path / "j")]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())

    assert "sqlite3" in loaded
    assert not loaded & {"sqlalchemy", "alembic", "psycopg"}


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path):
    journal = Journal(tmp_path / "j")
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))
    with (
        pytest.raises(JournalError, match="no such table: other"),
        open_file(journal.path, 1.0) as database,
        database.transaction(),
    ):
        database.execute("DELETE FROM attempt")
        database.execute("DELETE FROM other")

    assert len(journal.records()) == 1


def test_a_transaction_that_is_cut_off_changes_nothing(old: Path):
    with open_file(old, 1.0) as database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("DELETE FROM attempt")  # and no commit
    assert ask(old, "SELECT count(*) FROM attempt") == [(6,)]
    with open_file(old, 1.0) as database:
        prepare(database)
    assert ask(old, "SELECT count(*) FROM run") == [(4,)]


def test_a_locked_file_is_waited_for_no_longer_than_asked(tmp_path: Path):
    journal = Journal(tmp_path / "j", busy_s=0.05)
    with contextlib.closing(sqlite3.connect(journal.path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JournalError, match="locked"):
            journal.begin(AttemptRow("s", 1, ["x"], {}, []))
