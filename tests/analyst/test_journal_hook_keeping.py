"""The journal is opened beside the command's start, and its trouble is told when the command has ended."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from oomguard.analyst.journal_hook import JournalHook
from oomguard.core import log
from oomguard.core.errors import InputError
from oomguard.core.incident import Attempt, Incident
from oomguard.journal.queries import RunQuery, open_journal, past_runs
from oomguard.journal.store import Journal
from support.supervising import LIMIT_S

FAILED = Attempt(1, {}, exit_status=3)


@pytest.fixture
def told(monkeypatch):
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(
        log,
        "_writer",
        [lambda _level, event, fields: events.append((event, str(fields.get("reason"))))],
    )
    monkeypatch.setattr(log, "_least", [logging.INFO])
    return events


def test_beginning_waits_for_no_journal(tmp_path):
    opened = threading.Event()

    def slow() -> Journal:
        assert opened.wait(LIMIT_S)
        return Journal(tmp_path / "journal")

    keeper = JournalHook(slow)
    keeper.begin(1, ["job", "--api-key", "abcdefgh12345"], {}, ())
    opened.set()
    keeper.end(FAILED)
    (record,) = Journal(tmp_path / "journal").records()
    assert (record.exit_status, "abcdefgh12345" in record.command) == (3, False)


def test_each_survived_step_is_recorded_beside_the_figures(tmp_path):
    keeper = JournalHook(lambda: Journal(tmp_path / "journal"))
    steps = [{"part": "sampler", "tokens": 9, "requests": 2, "rolled_back": 2, "took_ms": 0.4}]
    keeper.begin(1, ["job"], {}, ())
    keeper.end(replace(FAILED, measured={"survived_steps": 1.0}), None, steps)
    (record,) = Journal(tmp_path / "journal").records()
    assert record.measured == {"survived_steps": 1.0, "survived": steps}
    with open_journal(tmp_path / "journal") as database:
        assert database is not None
        (past,) = past_runs(database, RunQuery())
    assert past.attempts[0].attempt.measured == {"survived_steps": 1.0}


def test_unopenable_journal_is_reported_once_at_the_attempts_end(told):
    def never() -> Journal:
        raise InputError("no place")

    keeper = JournalHook(never, is_asked_for=True)
    for number in (1, 2):
        keeper.begin(number, ["job"], {}, ())
        assert told == [("Not recording this run: the journal cannot be opened", "no place")] * (
            number - 1
        )
        keeper.end(FAILED)
    assert told == [("Not recording this run: the journal cannot be opened", "no place")]
    assert keeper.path is None


def test_default_path_is_reported_only_if_a_failure_needs_it(told):
    def never() -> Journal:
        raise InputError("no place")

    for attempt in (
        FAILED,
        Attempt(1, {}, exit_status=0),
        replace(FAILED, incident=Incident("cuda_oom", "no room")),
    ):
        assert told == []
        keeper = JournalHook(never)
        keeper.begin(1, ["job"], {}, ())
        keeper.end(attempt)
    assert told == [("Not recording this run: the journal cannot be opened", "no place")]


def test_attempt_time_excludes_its_diagnosis(tmp_path):
    keeper = JournalHook(lambda: Journal(tmp_path / "journal"))
    keeper.begin(1, ["job"], {}, ())
    keeper.end(replace(FAILED, seconds=1234.5))
    (record,) = Journal(tmp_path / "journal").records()

    assert record.ended_at - record.started_at == pytest.approx(1234.5)
