"""A journal that several share, on a real PostgreSQL: written behind, nothing lost, nothing twice, and refused with clear words."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import InputError, JournalError
from oomguard.core.installation import install_hint, upgrade_hint
from oomguard.core.past_runs import PastRun
from oomguard.journal import outbox
from oomguard.journal.codec import AttemptRow, RunIdentity
from oomguard.journal.database import SCHEMA_VERSION
from oomguard.journal.delivery import SharedJournal
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import deliver, deliver_abandoned, require_tables, waiting
from oomguard.journal.queries import RunQuery, known_to_work, open_journal, past_runs, remove_old
from oomguard.journal.store import Journal
from support.supervising import LIMIT_S

H100 = RunIdentity("vllm", "0.33.0", "org/m", "H100")
INCIDENT = {"kind": "cuda_oom", "causes": [{"id": "batch_too_large"}], "message": "a \0 in it"}
AWAY = JournalUrl("postgresql://team@127.0.0.1:1/team")
WRITER = """
import sys
from oomguard.journal.location import JournalUrl
from oomguard.journal.codec import AttemptRow
from oomguard.journal.delivery import SharedJournal
journal = SharedJournal(JournalUrl(sys.argv[1]))
for number in range(1, 10**6):
    journal.begin(AttemptRow(sys.argv[2], number, ["x"], {}, []))
    print(number, flush=True)
"""


@pytest.fixture
def shared(database: str) -> JournalUrl:
    return JournalUrl(database)


def runs(place: JournalUrl | Path, **asked: Any) -> list[PastRun]:
    with open_journal(place) as database:
        return [] if database is None else past_runs(database, RunQuery(**asked))


def write(
    journal: Journal | SharedJournal,
    session: str,
    *,
    fails: bool = False,
    at: float = 0.0,
    **more: Any,
) -> None:
    record = AttemptRow(
        session, 1, ["vllm", "serve", "org/m"], more.pop("settings", {}), [], started_at=at, **more
    )
    begun = journal.begin(record)
    told = {
        "incident": INCIDENT if fails else None,
        "measured": {"kv_cache_capacity_tokens": 1808},
        "ran": H100,
    }
    journal.end(begun, exit_status=int(fails), seconds=10.0 if at else None, **told)


def written(shared: JournalUrl, session: str, **more: Any) -> None:
    journal = SharedJournal(shared)
    write(journal, session, **more)
    assert journal.finish(LIMIT_S) is None


def left(shared: JournalUrl) -> list[Path]:
    return waiting(shared.outbox)


def test_written_rows_are_in_the_database_at_the_end(shared: JournalUrl, tmp_path: Path):
    written(shared, "s", fails=True, who="ann", host="node7", at=time.time())
    (run,) = runs(shared, number=1)
    write(Journal(tmp_path / "j"), "s", fails=True, who="ann", host="node7", at=run.began_at)

    assert (run.who, run.host, run.model, run.result) == ("ann", "node7", "org/m", "failed")
    assert run.incidents[0].message == "a � in it"
    assert replace(run, attempts=()) == replace(runs(tmp_path / "j", number=1)[0], attempts=())
    assert [(i.kind, i.causes[0].id) for i in runs(shared)[0].incidents] == [
        ("cuda_oom", "batch_too_large")
    ]
    assert left(shared) == []


def test_missing_database_is_reported_and_delivered_later(shared: JournalUrl, postgresql: Any):
    postgresql.stop()
    try:
        journal = SharedJournal(shared)
        began = time.monotonic()
        write(journal, "away")
        undelivered = journal.finish(LIMIT_S)
    finally:
        postgresql.start()

    assert undelivered is not None
    assert (undelivered.attempts, time.monotonic() - began < LIMIT_S) == (1, True)
    assert "refused" in undelivered.reason
    assert len(left(shared)) == 1

    written(shared, "next")
    until = time.monotonic() + LIMIT_S
    while left(shared) and time.monotonic() < until:
        deliver_abandoned(shared)
    assert {run.session for run in runs(shared)} == {"away", "next"}


def test_a_run_delivers_what_one_before_it_left_behind(shared: JournalUrl):
    journal = SharedJournal(AWAY)
    write(journal, "before")
    assert journal.finish(LIMIT_S) is not None
    (file,) = left(AWAY)
    shared.outbox.mkdir(parents=True)
    file.rename(shared.outbox / file.name)

    journal = SharedJournal(shared)
    write(journal, "after")
    until = time.monotonic() + LIMIT_S
    while len(left(shared)) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert journal.finish(LIMIT_S) is None
    assert {run.session for run in runs(shared)} == {"before", "after"}


def test_what_is_delivered_again_is_there_once(shared: JournalUrl):
    fields = {
        "session": "s",
        "number": 1,
        "command": ["x"],
        "settings": {},
        "patches": [],
        "started_at": 1e9,
    }
    begin = {"kind": "begin", "session": "s", "number": 1, "fields": fields}
    end = {
        "kind": "end",
        "session": "s",
        "number": 1,
        "fields": {"exit_status": 0, "incident": None, "measured": {}},
    }
    for rows in ([begin], [begin, end], [begin, end], [begin]):
        deliver(shared, rows)

    (run,) = runs(shared)
    assert (len(run.attempts), run.result) == (1, "ran")


def test_no_attempt_is_lost_or_doubled_when_processes_die(shared: JournalUrl, postgresql: Any):
    returned = {}
    for session in ("a", "b"):
        command = [sys.executable, "-c", WRITER, shared.url, session]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(200):
            line = writer.stdout.readline()
        if session == "a":
            postgresql.kill()
        writer.kill()
        line = writer.stdout.read().rstrip("\n").rpartition("\n")[2] or line
        returned[session] = int(line)
        writer.wait()
        writer.stdout.close()
        if session == "a":
            postgresql.start()
    until_s = time.monotonic() + LIMIT_S
    while waiting(shared.outbox) and time.monotonic() < until_s:
        deliver_abandoned(
            shared
        )  # the last writer's own process may have a file in hand for a moment

    by_session = {
        run.session: [past.attempt.number for past in run.attempts] for run in runs(shared)
    }
    for session, last in returned.items():
        numbers = by_session[session]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) - last in (0, 1)  # one whose call had not returned may be there too


def test_database_of_a_newer_version_is_untouched_and_data_waits(
    shared: JournalUrl, postgresql: Any
):
    written(shared, "s")
    database = shared.url.rpartition("/")[2]
    postgresql.sql(
        database, f"UPDATE oomguard.alembic_version SET version_num = '{SCHEMA_VERSION + 1}'"
    )
    journal = SharedJournal(shared)
    write(journal, "later")
    undelivered = journal.finish(LIMIT_S)
    with pytest.raises(InputError) as caught:
        runs(shared)

    assert undelivered is not None
    for said in (undelivered.reason, str(caught.value)):
        assert (
            f"newer oomguard (schema {SCHEMA_VERSION + 1}, this one reads {SCHEMA_VERSION})" in said
        )
    assert upgrade_hint() in str(caught.value.hint)
    assert len(left(shared)) == 1
    assert postgresql.sql(database, "SELECT count(*) FROM oomguard.run") == "1"


def test_several_that_make_the_tables_at_once_make_them_once(shared: JournalUrl, postgresql: Any):
    threads = [threading.Thread(target=require_tables, args=(shared,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    database = shared.url.rpartition("/")[2]
    assert postgresql.sql(database, "SELECT version_num FROM oomguard.alembic_version") == str(
        SCHEMA_VERSION
    )


def test_other_tables_of_the_same_database_are_in_nobodys_way(shared: JournalUrl, postgresql: Any):
    database = shared.url.rpartition("/")[2]
    postgresql.sql(
        database, "CREATE TABLE run (x int); CREATE TABLE alembic_version (version_num text)"
    )
    written(shared, "s")
    assert (
        postgresql.sql(database, "SELECT count(*) FROM public.run, public.alembic_version") == "0"
    )
    assert len(runs(shared)) == 1


@pytest.mark.parametrize(
    "tables",
    [
        "run (id int, note text)",
        "attempt ()",
        "alembic_version (version_num text); INSERT INTO oomguard.alembic_version VALUES ('5')",
        "attempt (session text); CREATE TABLE oomguard.alembic_version (version_num) AS SELECT 'ae1027a6acf'",
    ],
    ids=["run", "no_column", "version", "other_migrations"],
)
def test_schema_of_another_program_is_no_journal(shared: JournalUrl, postgresql: Any, tables: str):
    database = shared.url.rpartition("/")[2]
    postgresql.sql(database, f"CREATE SCHEMA oomguard; CREATE TABLE oomguard.{tables}")
    theirs = "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class WHERE relnamespace = 'oomguard'::regnamespace"
    before = postgresql.sql(database, theirs)
    journal = SharedJournal(shared)
    write(journal, "s")
    undelivered = journal.finish(LIMIT_S)
    assert undelivered is not None
    assert undelivered.is_refused
    assert (
        "not an oomguard journal: the schema oomguard contains another program's tables"
        in undelivered.reason
    )
    for ask in (lambda: runs(shared), lambda: remove_old(shared, 1.0)):
        with pytest.raises(InputError, match="not an oomguard journal") as caught:
            ask()
        assert "use another database" in str(caught.value.hint)
    assert postgresql.sql(database, theirs) == before
    postgresql.sql(database, "DROP SCHEMA oomguard CASCADE")
    assert deliver_abandoned(shared).attempts == 1


def test_a_server_that_only_reads_is_told_with_where_to_write(shared: JournalUrl):
    written(shared, "s", at=time.time() - 60)
    standby = JournalUrl(f"{shared.url}?options=-c%20default_transaction_read_only%3Don")
    with pytest.raises(InputError, match="read-only") as caught:
        remove_old(standby, 0.0)
    assert "name the primary server" in str(caught.value.hint)


def test_a_user_who_may_not_write_is_told_and_nothing_is_lost(shared: JournalUrl, postgresql: Any):
    written(shared, "s")
    postgresql.sql(
        "postgres",
        "DO $$ BEGIN CREATE ROLE guest LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    )
    guest = JournalUrl(shared.url.replace("team@", "guest@"))
    journal = SharedJournal(guest)
    write(journal, "of a guest")
    undelivered = journal.finish(LIMIT_S)

    assert undelivered is not None
    assert "permission denied" in undelivered.reason
    assert (
        "administrator to run: GRANT USAGE ON SCHEMA oomguard TO guest; GRANT SELECT, IN"
        in undelivered.reason
    )
    assert deliver_abandoned(shared).attempts == 1
    with pytest.raises(InputError, match="permission denied") as caught:
        runs(guest)
    assert "GRANT SELECT ON ALL TABLES IN SCHEMA oomguard TO guest" in str(caught.value.hint)
    with pytest.raises(InputError, match="permission denied") as caught:
        remove_old(guest, 1.0)
    assert "GRANT" in str(caught.value.hint)


def test_a_database_that_is_not_there_is_told_with_a_hint(postgresql: Any):
    with pytest.raises(InputError, match='"nowhere" does not exist'):
        runs(JournalUrl(postgresql.url("nowhere")))
    with pytest.raises(InputError, match="refused") as caught:
        runs(AWAY)
    assert "each machine keeps its own records" in str(caught.value.hint)


def test_reading_permits_no_writing(shared: JournalUrl):
    require_tables(shared)
    with open_journal(shared) as database, pytest.raises(JournalError, match="read-only"):
        assert database is not None
        database.execute("DELETE FROM run")


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_times_of_a_host_with_a_wrong_clock_are_the_databases(
    shared: JournalUrl, monkeypatch: pytest.MonkeyPatch, ahead_s: float
):
    now = time.time()
    journal = SharedJournal(AWAY)
    write(journal, "skewed", at=now + ahead_s)
    assert journal.finish(LIMIT_S) is not None
    (file,) = left(AWAY)
    shared.outbox.mkdir(parents=True)
    file.rename(shared.outbox / file.name)
    monkeypatch.setattr(outbox, "now", lambda: time.time() + ahead_s)
    deliver_abandoned(shared)

    (run,) = runs(shared)
    assert run.began_at == pytest.approx(now, abs=LIMIT_S)
    assert run.seconds == pytest.approx(10.0)


def test_later_failures_are_ordered_by_the_databases_clock(
    shared: JournalUrl,
):
    for session, fails, at in (
        ("held", False, 2000.0),
        ("failed before, delivered late", True, 1000.0),
    ):
        written(shared, session, fails=fails, at=at)
    with open_journal(shared) as database:
        assert database is not None
        assert [
            (known.held, known.failed, known.has_failed_since) for known in known_to_work(database)
        ] == [(1, 1, False)]

    written(shared, "failed since", fails=True, at=3000.0)
    with open_journal(shared) as database:
        assert database is not None
        assert [known.has_failed_since for known in known_to_work(database)] == [True]


def test_same_questions_have_equal_answers_in_both_databases(shared: JournalUrl, tmp_path: Path):
    journal = Journal(tmp_path / "j")
    for i in range(6):
        for to in (journal, SharedJournal(shared)):
            write(
                to,
                f"s{i}",
                fails=i % 2 == 0,
                at=1000.0 + i,
                settings={"max_model_len": 1792} if i > 2 else {},
            )
            assert to.finish(LIMIT_S) is None
    for asked in (
        {},
        {"failed": True},
        {"since": 1002.0},
        {"command": "ORG/m"},
        {"command": "no"},
        {"before": 4},
    ):
        told = [
            [(run.session, run.result, run.model) for run in runs(place, **asked)]
            for place in (journal.path, shared)
        ]
        assert told[0] == told[1], asked


def test_run_that_cannot_write_locally_is_an_input_error(
    shared: JournalUrl, tmp_path: Path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError) as caught:
        SharedJournal(shared).begin(AttemptRow("s", 1, ["x"], {}, []))
    assert "XDG_STATE_HOME" in str(caught.value.hint)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(JournalError, match="psycopg") as caught:
        deliver(AWAY, ())
    assert caught.value.hint == install_hint("postgres")


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
values = st.dictionaries(st.text(max_size=6), plain, max_size=4)


@pytest.fixture(scope="module")
def one_for_all(postgresql: Any) -> JournalUrl:
    return JournalUrl(postgresql.create("any_record"))


@settings(max_examples=30)
@given(command=st.lists(st.text(max_size=10), min_size=1, max_size=4), told=values)
def test_any_record_is_taken(one_for_all: JournalUrl, command: list[str], told: dict[str, Any]):
    session = uuid.uuid4().hex
    rows = [
        {
            "kind": "begin",
            "fields": {"command": command, "settings": told, "patches": [told], "started_at": 1.0},
        },
        {
            "kind": "end",
            "fields": {"exit_status": 1, "incident": {**told, "kind": "x"}, "measured": told},
        },
    ]
    for row in rows:
        row |= {"session": session, "number": 1}
        row["fields"] |= {"session": session, "number": 1} if row["kind"] == "begin" else {}
    deliver(one_for_all, rows)

    found = next(run for run in runs(one_for_all) if run.session == session)
    assert found.command == tuple(word.replace("\0", "�") for word in command)
    assert found.incidents[0].kind == "x"
