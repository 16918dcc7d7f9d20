"""Where a journal is: a path, or the URL of a database, whose password is never shown; and which files belong to one."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from oomguard.core.errors import UsageError
from oomguard.journal.location import JournalUrl, is_journal_file, parse_location
from oomguard.journal.store import Journal

SECRET = "Hunter2correct"
OLD = Path(__file__).with_name("schema_1.sqlite3")


@pytest.mark.parametrize("text", ["j.sqlite3", "/tmp/a:b//c", "", "postgresql", "C:/x"])
def test_what_is_no_url_is_a_path(text: str):
    assert parse_location(text) == Path(text)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "PostgreSQL"])
def test_every_spelling_of_a_postgresql_url_is_one_place(scheme: str):
    assert parse_location(f"{scheme}://ann@db/team") == JournalUrl("postgresql://ann@db/team")


@pytest.mark.parametrize("url", ["mysql://ann@db/team", "sqlite:///j", "https://db/x"])
def test_another_database_is_a_mistake_with_a_way_out(url: str):
    with pytest.raises(UsageError, match=url.partition(":")[0]) as caught:
        parse_location(url)
    assert "postgresql://USER@HOST/DATABASE" in str(caught.value.hint)


@pytest.mark.parametrize(
    "url",
    [f"postgresql://ann:{SECRET}@db/team", f"postgresql://db/team?user=ann&password={SECRET}"],
)
def test_a_password_is_not_shown(url: str):
    place = parse_location(url)
    assert SECRET not in f"{place} {place!r}"
    assert "db/team" in str(place)
    with pytest.raises(UsageError) as caught:
        parse_location(url.replace("postgresql", "mysql"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://ann@db/team", [("db", "")]),
        ("postgresql://ann:p%40@h1:5432,h2:5433/team", [("h1", "5432"), ("h2", "5433")]),
        ("postgresql://h1,[::1]:5433/team", [("h1", ""), ("::1", "5433")]),
        ("postgresql:///team", [("", "")]),
    ],
)
def test_a_url_may_name_several_hosts(url: str, hosts: list[tuple[str, str]]):
    assert list(parse_location(url).hosts) == hosts


@pytest.mark.parametrize("netloc", ["db:port", f"ann:{SECRET}/x@db", "[::1", "a:1:2"])
def test_unreadable_url_is_an_error_before_anything_runs(netloc: str):
    with pytest.raises(UsageError, match="cannot read its host and port") as caught:
        parse_location(f"postgresql://{netloc}/team")
    assert SECRET not in str(caught.value)
    assert "%40" in str(caught.value.hint)


def test_outbox_has_one_name_per_database():
    def name(url: str) -> str:
        return JournalUrl(url).outbox.name

    assert name(f"postgresql://ann:{SECRET}@db/team") == name("postgresql://bob@db/team")
    others = [
        "postgresql://db/other",
        "postgresql://db2/team",
        "postgresql://db:5433/team",
        "postgresql:///team?host=/run",
        "postgresql://db,db2/team",
    ]
    assert len({name("postgresql://db/team"), *map(name, others)}) == len(others) + 1
    assert all("/" not in name(url) and SECRET not in name(url) for url in others)


@pytest.mark.parametrize("end", ["", "-wal", "-shm", "-journal"])
def test_journal_of_any_schema_with_sqlite_files_is_recognized(tmp_path: Path, end: str):
    Journal(tmp_path / "new name")
    shutil.copy(OLD, tmp_path / "old")
    assert is_journal_file(f"{tmp_path / 'new name'}{end}")
    assert is_journal_file(f"{tmp_path / 'old'}{end}")


def test_journal_being_written_is_recognized_and_unchanged(tmp_path: Path):
    Journal(path := tmp_path / "j")
    before = path.read_bytes()
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert is_journal_file(str(path))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["j"]


@pytest.mark.parametrize("name", ["other", "text", "empty", "missing", "other-wal"])
def test_any_other_file_is_none(tmp_path: Path, name: str):
    with closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE attempt (session, note)")
        other.commit()
    (tmp_path / "text").write_text("SQLite format 3")
    (tmp_path / "empty").touch()
    assert not is_journal_file(str(tmp_path / name))


def test_what_waits_for_a_server_is_known_by_its_place(tmp_path: Path):
    assert is_journal_file(str(tmp_path / "oomguard" / "undelivered" / "team-0123" / "s.jsonl"))
    assert not is_journal_file(str(tmp_path / "results" / "s.jsonl"))
