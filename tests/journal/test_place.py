"""Where a journal is: a path, or the URL of a database, whose password is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.errors import UsageError
from oomguard.journal.place import Shared, place_of

SECRET = "Hunter2correct"


@pytest.mark.parametrize("text", ["j.sqlite3", "/tmp/a:b//c", "", "postgresql", "C:/x"])
def test_what_is_no_url_is_a_path(text: str):
    assert place_of(text) == Path(text)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg", "PostgreSQL"])
def test_every_spelling_of_a_postgresql_url_is_one_place(scheme: str):
    assert place_of(f"{scheme}://ann@db/team") == Shared("postgresql://ann@db/team")


@pytest.mark.parametrize("url", ["mysql://ann@db/team", "sqlite:///j", "https://db/x"])
def test_another_database_is_a_mistake_with_a_way_out(url: str):
    with pytest.raises(UsageError, match=url.partition(":")[0]) as caught:
        place_of(url)
    assert "postgresql://USER@HOST/DATABASE" in str(caught.value.hint)


@pytest.mark.parametrize(
    "url", [f"postgresql://ann:{SECRET}@db/team", f"postgresql://db/team?user=ann&password={SECRET}"]
)
def test_a_password_is_not_shown(url: str):
    place = place_of(url)
    assert SECRET not in f"{place} {place!r}"
    assert "db/team" in str(place)
    with pytest.raises(UsageError) as caught:
        place_of(url.replace("postgresql", "mysql"))
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
    assert list(place_of(url).hosts) == hosts


@pytest.mark.parametrize("netloc", ["db:port", f"ann:{SECRET}/x@db", "[::1", "a:1:2"])
def test_a_url_that_cannot_be_read_is_a_mistake_before_anything_runs(netloc: str):
    with pytest.raises(UsageError, match="cannot be read") as caught:
        place_of(f"postgresql://{netloc}/team")
    assert SECRET not in str(caught.value)
    assert "%40" in str(caught.value.hint)


def test_what_waits_for_a_database_has_one_name_whoever_writes_and_another_for_another_database():
    def name(url: str) -> str:
        return Shared(url).name

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
