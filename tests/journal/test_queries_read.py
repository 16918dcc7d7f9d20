"""Reading a journal without changing it: which runs are returned, and clear words for what is not a journal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.core.errors import InputError, JournalError
from oomguard.core.installation import upgrade_hint
from oomguard.core.past_runs import PastRun
from oomguard.journal.queries import RunQuery, each_run, open_journal, past_runs
from oomguard.journal.store import AttemptRow, Journal, default_path

OLD = Path(__file__).with_name("schema_1.sqlite3")
PATCH = {
    "setting": "max_model_len",
    "from": 32768,
    "to": 1792,
    "effect": "reduces-capacity",
    "predicts": {"kv_cache_capacity_tokens": 1792},
}
INCIDENT = {
    "kind": "kv_cache_too_small_for_max_len",
    "message": "To serve",
    "causes": [
        {"id": "max_model_len_too_large", "rule": "OG201", "confidence": 0.9, "evidence": []}
    ],
    "facts": {"max_model_len_tokens": 32768},
}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3")


def write(
    journal: Journal,
    session: str,
    *ends: tuple[int, bool] | None,
    command=("vllm", "serve", "m"),
    at=1000.0,
):
    """One run; an attempt a tuple of exit status and whether it had an incident, None for one that has not ended."""
    for number, end in enumerate(ends, 1):
        patches = [PATCH] if number > 1 else []
        settings = {"max_model_len": 1792} if number > 1 else {}
        record = AttemptRow(session, number, command, settings, patches, started_at=at + number)
        begun = journal.begin(record)
        if end is not None:
            status, has_incident = end
            journal.end(
                begun,
                exit_status=status,
                incident=INCIDENT if has_incident else None,
                measured={"peak_bytes": 1},
            )


def runs(journal: Journal, limit: int | None = None, **asked: object) -> list[PastRun]:
    with open_journal(journal.path) as database:
        assert database is not None
        return past_runs(database, RunQuery(**asked), limit=limit)  # type: ignore[arg-type]


def test_newest_run_is_first_and_the_limit_drops_older_ones(journal: Journal):
    for i in range(5):
        write(journal, f"s{i}", (0, False))

    assert [run.number for run in runs(journal)] == [5, 4, 3, 2, 1]
    assert [run.number for run in runs(journal, 2)] == [5, 4]


@pytest.mark.parametrize(
    ("ends", "result", "is_failed"),
    [
        ([(0, False)], "ran", False),
        ([(1, True), (0, False)], "repaired", False),
        ([(1, True), (143, False)], "repaired", False),
        ([(3, False), (139, False), (0, False)], "repaired", False),
        ([(0, False), (0, False)], "repaired", False),
        ([(143, False), (143, False)], "repaired", False),
        ([(1, True), (1, True)], "failed", True),
        ([(1, False)], "failed", True),
        ([(0, True)], "failed", True),
        ([(130, False)], "stopped", False),
        ([(137, False)], "failed", True),
        ([None], "not ended", False),
        ([(1, True), None], "not ended", False),
    ],
)
def test_how_a_run_ended_is_told_by_its_last_attempt(journal: Journal, ends, result, is_failed):
    write(journal, "s", *ends)

    assert runs(journal)[0].result == result
    assert bool(runs(journal, failed=True)) == is_failed


def test_a_command_is_found_by_words_of_it_in_any_case(journal: Journal):
    write(journal, "a", (0, False), command=("python", "my job.py", "--who", 'the "best"', "ä\\n"))
    write(journal, "b", (0, False))

    for text in ("MY JOB", "python my", 'the "best" ä\\n', 'THE "BEST" Ä\\N', "--who"):
        assert [run.session for run in runs(journal, command=text)] == ["a"]
    assert [run.session for run in runs(journal, command="vllm serve")] == ["b"]
    assert runs(journal, command="%") == runs(journal, command="_") == []


def test_runs_are_taken_by_when_they_began(journal: Journal):
    for i, at in enumerate((1000.0, 2000.0)):
        write(journal, f"s{i}", (1, True), (0, False), at=at)

    assert [run.session for run in runs(journal, since=1500.0)] == ["s1"]
    assert len(runs(journal, since=1001.0)) == 2


def test_a_list_has_kind_cause_changes_and_figures(journal: Journal):
    write(journal, "s", (1, True), (0, False))
    (run,) = runs(journal)

    assert [(i.kind, i.causes[0].id) for i in run.incidents] == [
        ("kv_cache_too_small_for_max_len", "max_model_len_too_large")
    ]
    assert [(p.setting, p.old, p.new, str(p.effect)) for p in run.patches] == [
        ("max_model_len", 32768, 1792, "reduces-capacity")
    ]
    assert run.attempts[1].attempt.measured == {"peak_bytes": 1}


def test_one_run_in_full_has_the_message_and_the_facts(journal: Journal):
    write(journal, "s", (1, True))
    (run,) = runs(journal, number=1)

    assert run.incidents[0].message == "To serve"
    assert run.incidents[0].number("max_model_len_tokens") == 32768
    assert run.incidents[0].causes[0].rule == "OG201"


def test_there_is_no_run_of_another_number(journal: Journal):
    write(journal, "s", (0, False))

    assert runs(journal, number=2) == []


@given(text=st.text(min_size=1, max_size=12))
def test_searched_text_finds_the_command_with_that_text(tmp_path_factory, text: str):
    journal = Journal(tmp_path_factory.mktemp("journal") / "j")
    write(journal, "s", (0, False), command=("run", text))

    assert [run.command for run in runs(journal, command=text)] == [("run", text)]


def test_runs_are_read_in_pages_without_locking_others_out(journal: Journal, monkeypatch):
    monkeypatch.setattr("oomguard.journal.queries.MOST_VALUES", 2)
    for i in range(5):
        write(journal, f"s{i}", (0, False))
    with open_journal(journal.path) as database:
        assert database is not None
        found = each_run(database, RunQuery(command="vllm"))
        numbers = [next(found).number]
        write(Journal(journal.path, busy_s=0.0), "meanwhile", (0, False))
        numbers += [run.number for run in found]
        limited = [run.number for run in each_run(database, RunQuery(), limit=3)]

    assert numbers == [5, 4, 3, 2, 1]
    assert limited == [6, 5, 4]


def test_runs_that_failed_are_found_beside_one_of_more_attempts(journal: Journal):
    write(journal, "failed", (1, True))
    write(journal, "repaired", (1, True), (0, False))
    write(journal, "failed again", (1, True), (1, True))

    assert [run.number for run in runs(journal, failed=True)] == [3, 1]


def test_attempt_followed_by_another_failed_whatever_its_status(journal: Journal):
    """One that hung and was ended says 0 or 143."""
    write(journal, "s", (0, False), (143, False), (137, False), (0, False))
    assert [past.result for past in runs(journal)[0].attempts] == [
        "failed",
        "failed",
        "failed",
        "ran",
    ]


@pytest.mark.parametrize("status", [0, 143])
def test_attempt_ended_for_a_hang_failed_whatever_its_status(journal: Journal, status: int):
    begun = journal.begin(AttemptRow("s", 1, ["vllm", "serve", "m"], {}, []))
    journal.end(
        begun, exit_status=status, incident=None, measured={"x": 1}, error="the server hangs: x"
    )

    (run,) = runs(journal, failed=True)
    assert (run.result, run.attempts[0].attempt.error) == ("failed", "the server hangs: x")


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught, open_journal(path, busy_s=0.05) as database:
        assert database is not None
        past_runs(database, RunQuery())
    return caught.value


def test_a_journal_of_schema_1_is_read_and_stays_as_it_is(tmp_path: Path):
    path = Path(shutil.copy(OLD, tmp_path / "old.sqlite3"))
    content = path.read_bytes()
    with open_journal(path) as database:
        runs = past_runs(database, RunQuery())

    assert [(run.number, run.result) for run in runs] == [
        (4, "failed"),
        (3, "failed"),
        (2, "ran"),
        (1, "repaired"),
    ]
    assert path.read_bytes() == content


def test_no_journal_of_ones_own_is_no_mistake_and_none_is_made():
    with open_journal() as database:
        assert database is None
    assert not default_path().parent.exists()


def test_an_empty_file_has_no_runs(tmp_path: Path):
    (tmp_path / "empty").touch()
    with open_journal(tmp_path / "empty") as database:
        assert past_runs(database, RunQuery()) == []


def test_reading_permits_no_writing(tmp_path: Path):
    Journal(tmp_path / "j")
    with open_journal(tmp_path / "j") as database, pytest.raises(JournalError, match="readonly"):
        assert database is not None
        database.execute("DELETE FROM run")


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
        ("record", "not JSON", "mv "),
    ],
)
def test_what_is_no_journal_is_told_with_a_way_out(
    tmp_path: Path, kind: str, words: str, hint: str
):
    path = tmp_path / "it is"
    journal = Journal(tmp_path / "whole")
    for i in range(200):
        journal.begin(AttemptRow(f"s{i}", 1, ["x" * 200], {}, []))
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


def test_locked_journal_is_reported_and_waited_for_briefly(tmp_path: Path):
    Journal(tmp_path / "j")
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        error = refusal(tmp_path / "j")

    assert "locked" in str(error)
    assert "another program has locked it" in str(error.hint)
