"""The journal: what is written is read back, by several processes at once, and an unusable place is one message."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import InputError
from oomguard.journal.store import AttemptRow, Journal, RunIdentity, default_path

WRITER = """
import sys
from pathlib import Path
from oomguard.journal.store import Journal, AttemptRow
journal = Journal(Path(sys.argv[1]))
for number in range(1, 26):
    begun = journal.begin(AttemptRow(sys.argv[2], number, ["run"], {"n": number}, []))
    journal.end(begun, exit_status=number % 2, incident=None, measured={"n": number})
"""
PATCH = {"setting": "max_model_len", "from": 8192, "to": 4096}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "a" / "b" / "journal.sqlite3")


def test_a_new_journal_is_empty_and_makes_its_folder(journal):
    assert journal.records() == []
    assert journal.path.is_file()


def test_a_record_is_read_back_as_it_was_written(journal):
    before = time.time()
    begun = journal.begin(
        AttemptRow(
            "s",
            1,
            ["vllm", "serve", "ü"],
            {"max_model_len": 4096},
            [PATCH],
            predicted={"peak_bytes": 1.5},
        )
    )
    journal.end(begun, exit_status=3, incident={"kind": "cuda_oom"}, measured={"peak_bytes": 2})

    (record,) = journal.records()

    assert (record.session, record.number, record.command) == ("s", 1, ["vllm", "serve", "ü"])
    assert (record.settings, record.patches) == ({"max_model_len": 4096}, [PATCH])
    assert (record.predicted, record.measured) == ({"peak_bytes": 1.5}, {"peak_bytes": 2})
    assert (record.incident, record.exit_status) == ({"kind": "cuda_oom"}, 3)
    assert before <= record.started_at <= record.ended_at <= time.time()


def test_end_of_a_removed_run_is_written_to_no_other_run(
    journal,
):
    ours, theirs = Journal(journal.path), Journal(journal.path)
    begun = ours.begin(AttemptRow("ours", 1, ["x"], {}, [], who="ann"))
    with contextlib.closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("DELETE FROM run")
        database.execute("DELETE FROM attempt")
    theirs.begin(AttemptRow("theirs", 1, ["y"], {}, []))
    ours.end(begun, exit_status=3, incident=None, measured={})

    assert [(each.session, each.exit_status) for each in journal.records()] == [
        ("theirs", None),
        ("ours", 3),
    ]
    with contextlib.closing(sqlite3.connect(journal.path)) as database:
        assert database.execute("SELECT who FROM run WHERE session = 'ours'").fetchall() == [
            ("ann",)
        ]


def test_later_attempt_of_a_removed_run_still_names_its_owner(journal):
    begun = journal.begin(
        AttemptRow("s", 1, ["x"], {}, [], original=["x", "y"], who="ann", host="node7")
    )
    journal.end(begun, exit_status=1, incident=None, measured={})
    with contextlib.closing(sqlite3.connect(journal.path)) as database, database:
        database.execute("DELETE FROM run")
    journal.begin(AttemptRow("s", 2, ["x"], {}, []))
    with contextlib.closing(sqlite3.connect(journal.path)) as database:
        assert database.execute("SELECT original, who, host FROM run").fetchall() == [
            ('["x", "y"]', "ann", "node7")
        ]


def test_an_attempt_that_runs_has_no_end(journal):
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))

    (record,) = journal.records()

    assert (record.ended_at, record.exit_status, record.incident) == (None, None, None)


def test_an_attempt_without_an_incident_has_none(journal):
    journal.end(
        journal.begin(AttemptRow("s", 1, ["x"], {}, [])), exit_status=0, incident=None, measured={}
    )

    assert journal.records()[0].incident is None
    assert journal.records()[0].exit_status == 0


def test_a_start_that_is_given_is_kept(journal):
    journal.begin(AttemptRow("s", 1, ["x"], {}, [], started_at=123.5))

    assert journal.records()[0].started_at == 123.5


def test_only_the_row_that_ended_is_ended(journal):
    first = journal.begin(AttemptRow("s", 1, ["x"], {}, []))
    journal.begin(AttemptRow("s", 2, ["x"], {}, []))
    journal.end(first, exit_status=7, incident=None, measured={})

    assert [record.exit_status for record in journal.records()] == [7, None]


def test_records_are_in_order_and_by_session(journal):
    for session, number in [("a", 1), ("b", 1), ("a", 2)]:
        journal.begin(AttemptRow(session, number, ["x"], {}, []))

    assert [(record.session, record.number) for record in journal.records()] == [
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]
    assert [record.number for record in journal.records("a")] == [1, 2]
    assert journal.records("c") == []


def test_a_session_s_name_is_no_sql(journal):
    name = "'; DROP TABLE attempt; --"
    journal.begin(AttemptRow(name, 1, [name], {}, []))

    assert [record.session for record in journal.records(name)] == [name]


def test_a_journal_is_opened_again(journal):
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))

    assert len(Journal(journal.path).records()) == 1


def test_runs_have_numbers_without_gaps_whatever_their_attempts(journal):
    for session in "ab":
        for number in (1, 2, 3):
            journal.begin(AttemptRow(session, number, ["x"], {}, []))
    with contextlib.closing(sqlite3.connect(journal.path)) as database:
        assert database.execute("SELECT number, session FROM run").fetchall() == [
            (1, "a"),
            (2, "b"),
        ]


def test_known_facts_of_a_run_survive_a_silent_attempt(journal):
    for number, ran in (
        (1, RunIdentity("vllm", "0.33.0", None, "H100")),
        (2, RunIdentity("vllm", None, "./m", None)),
        (3, None),
    ):
        begun = journal.begin(AttemptRow("s", number, ["x"], {}, []))
        journal.end(begun, exit_status=1, incident=None, measured={}, ran=ran)
    with contextlib.closing(sqlite3.connect(journal.path)) as database:
        found = database.execute("SELECT engine, engine_version, model, device FROM run").fetchall()
    assert found == [("vllm", "0.33.0", "./m", "H100")]


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path):
    path = tmp_path / "journal.sqlite3"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("a", "b")
    ]
    statuses = [writer.wait(timeout=60) for writer in writers]

    records = Journal(path).records()

    assert statuses == [0, 0]
    assert len(records) == 50
    for name in ("a", "b"):
        own = [record for record in records if record.session == name]
        assert [record.number for record in own] == list(range(1, 26))
        assert all(record.measured == {"n": record.number} for record in own)
        assert all(record.exit_status == record.number % 2 for record in own)


def test_a_place_below_a_file_is_an_input_error_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(InputError, match=r"journal\.sqlite3") as caught:
        Journal(tmp_path / "file" / "journal.sqlite3")

    assert "--journal PATH" in caught.value.hint


def test_a_folder_is_no_journal(tmp_path):
    with pytest.raises(InputError):
        Journal(tmp_path)


def test_a_file_of_another_kind_is_no_journal_and_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 200)

    with pytest.raises(InputError):
        Journal(path)

    assert path.read_text() == "dear diary, " * 200


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(InputError):
        Journal(tmp_path / "file" / "journal.sqlite3")


def test_the_state_folder_of_the_user_is_respected(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    assert default_path() == tmp_path / "oomguard" / "journal.sqlite3"


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
)


@settings(deadline=None, max_examples=30)
@given(
    command=st.lists(st.text(max_size=10), max_size=4),
    values=st.dictionaries(st.text(max_size=8), plain, max_size=4),
    patches=st.lists(st.dictionaries(st.text(max_size=8), plain, max_size=3), max_size=3),
)
def test_any_record_is_read_back(tmp_path_factory, command, values, patches):
    journal = Journal(tmp_path_factory.mktemp("journal") / "j.sqlite3")
    journal.end(
        journal.begin(AttemptRow("s", 1, command, values, patches, predicted=values)),
        exit_status=0,
        incident=values,
        measured=values,
    )

    (record,) = journal.records()

    assert (record.command, record.settings, record.patches) == (command, values, patches)
    assert (record.predicted, record.measured, record.incident) == (values, values, values)
