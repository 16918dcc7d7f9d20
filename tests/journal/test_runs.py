"""The runs of a journal: which are returned, in which order, and what they say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomguard.journal.reading import reading
from oomguard.journal.runs import Asked, each_run, past_runs
from oomguard.journal.store import Journal, Record
from oomguard.past_runs import PastRun

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
    "causes": [{"id": "max_model_len_too_large", "rule": "OG201", "confidence": 0.9, "evidence": []}],
    "facts": {"max_model_len_tokens": 32768},
}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3")


def write(journal: Journal, session: str, *ends: tuple[int, bool] | None, command=("vllm", "serve", "m"), at=1000.0):
    """One run; an attempt a tuple of exit status and whether it had an incident, None for one that has not ended."""
    for number, end in enumerate(ends, 1):
        patches = [PATCH] if number > 1 else []
        settings = {"max_model_len": 1792} if number > 1 else {}
        record = Record(session, number, command, settings, patches, started_at=at + number)
        row = journal.begin(record)
        if end is not None:
            status, has_incident = end
            journal.end(
                row, exit_status=status, incident=INCIDENT if has_incident else None, measured={"peak_bytes": 1}
            )


def runs(journal: Journal, limit: int | None = None, **asked: object) -> list[PastRun]:
    with reading(journal.path) as database:
        assert database is not None
        return past_runs(database, Asked(**asked), limit=limit)  # type: ignore[arg-type]


def test_the_newest_run_is_first_and_the_limit_leaves_older_ones_out(journal: Journal):
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
def test_any_text_that_is_searched_for_finds_the_command_that_is_that_text(tmp_path_factory, text: str):
    journal = Journal(tmp_path_factory.mktemp("journal") / "j")
    write(journal, "s", (0, False), command=("run", text))

    assert [run.command for run in runs(journal, command=text)] == [("run", text)]


def test_runs_are_read_page_by_page_and_nobody_is_locked_out_meanwhile(journal: Journal, monkeypatch):
    monkeypatch.setattr("oomguard.journal.runs._AT_ONCE", 2)
    for i in range(5):
        write(journal, f"s{i}", (0, False))
    with reading(journal.path) as database:
        assert database is not None
        found = each_run(database, Asked(command="vllm"))
        numbers = [next(found).number]
        write(Journal(journal.path, busy_s=0.0), "meanwhile", (0, False))
        numbers += [run.number for run in found]
        limited = [run.number for run in each_run(database, Asked(), limit=3)]

    assert numbers == [5, 4, 3, 2, 1]
    assert limited == [6, 5, 4]


def test_runs_that_failed_are_found_beside_one_of_more_attempts(journal: Journal):
    write(journal, "failed", (1, True))
    write(journal, "repaired", (1, True), (0, False))
    write(journal, "failed again", (1, True), (1, True))

    assert [run.number for run in runs(journal, failed=True)] == [3, 1]


def test_an_attempt_that_another_one_followed_has_failed_whatever_its_status(journal: Journal):
    """One that hung and was ended says 0 or 143."""
    write(journal, "s", (0, False), (143, False), (137, False), (0, False))
    assert [past.result for past in runs(journal)[0].attempts] == ["failed", "failed", "failed", "ran"]


@pytest.mark.parametrize("status", [0, 143])
def test_one_that_was_ended_since_it_hung_failed_whatever_its_status(journal: Journal, status: int):
    row = journal.begin(Record("s", 1, ["vllm", "serve", "m"], {}, []))
    journal.end(row, exit_status=status, incident=None, measured={"x": 1}, error="the server hangs: x")

    (run,) = runs(journal, failed=True)
    assert (run.result, run.attempts[0].attempt.error) == ("failed", "the server hangs: x")
