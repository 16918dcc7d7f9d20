"""The journal and the rules, on real files."""

from __future__ import annotations

import sqlite3

from oomguard.cli.doctor import journal_check, rules_check
from oomguard.journal.store import AttemptRow, Journal, default_path


def test_a_journal_that_is_not_there_yet_is_fine_and_is_not_made(tmp_path):
    assert journal_check(None).status == "ok"
    assert journal_check(tmp_path / "deep/er/journal").status == "ok"
    assert not default_path().exists()
    assert not (tmp_path / "deep").exists()


def test_the_attempts_of_a_journal_are_counted(tmp_path):
    path = tmp_path / "journal #1?.sqlite3"
    Journal(path).begin(AttemptRow("s", 1, ["true"], {}, []))
    check = journal_check(path)

    assert (check.status, check.text) == ("ok", f"journal: {path}, 1 attempts")


def test_a_journal_that_cannot_be_used_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("no database at all, and long enough to be taken for one" * 20)
    (tmp_path / "newer").touch()
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute("CREATE TABLE attempt (id)")
        database.execute("PRAGMA user_version = 99")
    database.close()

    for path, words in (
        ("file", "cannot read the journal"),
        ("file/journal", "cannot write the journal"),
        ("newer", "a newer oomguard"),
        ("", "cannot read the journal"),
    ):
        check = journal_check(tmp_path / path)
        assert check.status == "problem", path
        assert words in check.text


def test_a_rule_file_with_a_mistake_is_a_problem_that_names_it(tmp_path):
    assert rules_check(()).status == "ok"
    (tmp_path / "mine.toml").write_text("schema = \n")
    check = rules_check((str(tmp_path),))

    assert check.status == "problem"
    assert f"{tmp_path / 'mine.toml'}:1, column 10" in check.text
