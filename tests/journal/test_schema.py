"""A journal of schema 1, made by the oomguard that wrote it, becomes one of this version; nothing of it is lost."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, inspect

import oomguard
from oomguard.errors import InputError
from oomguard.journal.database import SCHEMA_NAME, postgresql_engine, sqlite_engine
from oomguard.journal.place import Shared
from oomguard.journal.schema import prepare, version_of
from oomguard.journal.schema_version import SCHEMA_VERSION
from oomguard.journal.store import Journal, Ran, Record

MIGRATIONS = Path(oomguard.__file__).parent / "journal" / "migrations"
OLD = Path(__file__).with_name("schema_1.sqlite3")
OLD_COLUMNS = (
    "id, session, number, started_at, ended_at, command, settings, patches, incident, predicted, measured, exit_status"
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "journal.sqlite3"))


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def test_every_attempt_of_an_old_journal_stays_as_it_was(old: Path):
    before = ask(old, f"SELECT {OLD_COLUMNS} FROM attempt ORDER BY id")
    Journal(old)

    assert len(before) == 6
    assert ask(old, f"SELECT {OLD_COLUMNS} FROM attempt ORDER BY id") == before
    assert ask(old, "PRAGMA user_version") == [(SCHEMA_VERSION,)]


def test_its_runs_are_numbered_in_their_order_and_know_the_command_before_any_patch(old: Path):
    Journal(old)

    runs = ask(
        old, "SELECT number, original, engine, engine_version, model, device, forgotten FROM run ORDER BY number"
    )

    assert [run[0] for run in runs] == [1, 2, 3, 4]
    assert runs[0][1] == '["python3", "./fake_engine.py", "--api-key", "***"]'
    assert [run[2:4] for run in runs] == [("vllm", None), (None, None), ("vllm", None), ("vllm", "0.32.0")]
    assert {run[4:] for run in runs} == {(None, None, 0)}


def test_an_old_journal_is_written_on(old: Path):
    journal = Journal(old)
    row = journal.begin(Record("new", 1, ["vllm", "--x"], {}, [], original=["vllm"], folder="/work", files="abc"))
    journal.end(row, exit_status=0, incident=None, measured={}, ran=Ran("vllm", "0.33.0", "./m", "H100"))

    assert ask(old, "SELECT * FROM run WHERE number = 5") == [
        (5, "new", '["vllm"]', "/work", "abc", "vllm", "0.33.0", "./m", "H100", 0, None, None, None, None)
    ]


def test_an_older_oomguard_that_still_runs_writes_on_and_its_attempts_have_a_run(old: Path):
    Journal(old)
    with contextlib.closing(sqlite3.connect(old)) as database, database:
        database.execute(
            "INSERT INTO attempt (session, number, started_at, command, settings, patches, predicted, measured)"
            " VALUES ('old', 1, 1.0, '[\"x\"]', '{}', '[]', '{}', '{}')"
        )

    assert ask(old, "SELECT number, original FROM run WHERE session = 'old'") == [(5, '["x"]')]


def test_runs_have_numbers_without_gaps_whatever_their_attempts(tmp_path: Path):
    journal = Journal(tmp_path / "j")
    for session in "ab":
        for number in (1, 2, 3):
            journal.begin(Record(session, number, ["x"], {}, []))

    assert ask(journal.path, "SELECT number, session FROM run") == [(1, "a"), (2, "b")]


def test_what_is_known_of_a_run_stays_where_a_later_attempt_does_not_tell(tmp_path: Path):
    journal = Journal(tmp_path / "j")
    for number, ran in ((1, Ran("vllm", "0.33.0", None, "H100")), (2, Ran("vllm", None, "./m", None)), (3, None)):
        row = journal.begin(Record("s", number, ["x"], {}, []))
        journal.end(row, exit_status=1, incident=None, measured={}, ran=ran)

    assert ask(journal.path, "SELECT engine, engine_version, model, device FROM run") == [
        ("vllm", "0.33.0", "./m", "H100")
    ]


def test_several_that_migrate_at_once_migrate_it_once(old: Path):
    code = (
        "import sys; from pathlib import Path; from oomguard.journal.store import Journal; Journal(Path(sys.argv[1]))"
    )
    openers = [subprocess.Popen([sys.executable, "-c", code, str(old)]) for _ in range(4)]

    assert [opener.wait(timeout=60) for opener in openers] == [0] * 4
    assert ask(old, "SELECT count(*) FROM run") == [(4,)]


def test_a_migration_that_is_cut_off_leaves_the_old_journal(old: Path):
    with sqlite_engine(old, 1.0).connect() as database:
        prepare(database)  # and no commit

    assert ask(old, "PRAGMA user_version") == [(1,)]
    assert ask(old, "SELECT count(*) FROM sqlite_master WHERE name = 'run'") == [(0,)]


def test_a_database_of_another_program_is_left_alone(tmp_path: Path):
    path = tmp_path / "other.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE notes (text)")
        database.commit()

    with pytest.raises(InputError, match="another program"):
        Journal(path)
    assert ask(path, "SELECT name FROM sqlite_master") == [("notes",)]


def columns(connection: Connection) -> dict[str, list[tuple[str, bool]]]:
    found = inspect(connection)
    return {
        table: [(column["name"], column["nullable"]) for column in found.get_columns(table)]
        for table in sorted(found.get_table_names())
    }


def indexes(connection: Connection) -> set[tuple[str, tuple[str | None, ...], bool]]:
    found = inspect(connection)
    kinds = [index for table in found.get_table_names() for index in found.get_indexes(table)]
    return {(str(index["name"]), tuple(index["column_names"]), bool(index["unique"])) for index in kinds}


def test_a_new_file_has_the_tables_that_migrations_make_of_an_old_one(old: Path, tmp_path: Path):
    Journal(old)
    Journal(tmp_path / "new")
    with sqlite_engine(old, 1.0).connect() as migrated, sqlite_engine(tmp_path / "new", 1.0).connect() as made:
        # SQLite's own primary key is told as one that may be NULL where it was written so
        keys = {("attempt", "id"), ("alembic_version", "version_num")}
        all_columns = [
            {
                (table, *column)
                for table, rows in columns(one).items()
                for column in rows
                if (table, column[0]) not in keys
            }
            for one in (migrated, made)
        ]
        assert all_columns[0] == all_columns[1]
        assert indexes(migrated) == indexes(made)
        assert [ask(path, "SELECT version_num FROM alembic_version") for path in (old, tmp_path / "new")] == [
            [(str(SCHEMA_VERSION),)]
        ] * 2


def test_a_new_shared_database_has_the_tables_that_migrations_make(postgresql: Any):
    migrated, made = (Shared(postgresql.create(f"{kind}_{uuid.uuid4().hex}")) for kind in ("migrated", "made"))
    with postgresql_engine(migrated).begin() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {SCHEMA_NAME}")
        connection.exec_driver_sql("CREATE TABLE other (x int)")  # so that it is not made at once
        prepare(connection)
        connection.exec_driver_sql("DROP TABLE other")
    with postgresql_engine(made).begin() as connection:
        prepare(connection)
    with postgresql_engine(migrated).connect() as first, postgresql_engine(made).connect() as second:
        assert columns(first) == columns(second)
        assert indexes(first) == indexes(second)
        assert version_of(first) == version_of(second) == SCHEMA_VERSION


@pytest.mark.parametrize("schema", range(2, SCHEMA_VERSION))
def test_a_journal_of_each_schema_between_is_migrated_and_stays_readable_by_its_number(old: Path, schema: int):
    """What an earlier oomguard wrote has no table of Alembic's, and says its schema in PRAGMA user_version."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with sqlite_engine(old, 1.0).begin() as connection:
        config.attributes["connection"] = connection
        command.stamp(config, "1")
        command.upgrade(config, str(schema))
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql(f"PRAGMA user_version = {schema}")

    assert len(Journal(old).records()) == 6
    assert ask(old, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert ask(old, "SELECT count(*) FROM run WHERE who IS NULL") == [(4,)]


def test_a_newer_journal_is_refused_with_both_versions(tmp_path: Path):
    Journal(tmp_path / "j")
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as database, database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(InputError, match=rf"schema {SCHEMA_VERSION + 1}, this one reads {SCHEMA_VERSION}\)"):
        Journal(tmp_path / "j")
