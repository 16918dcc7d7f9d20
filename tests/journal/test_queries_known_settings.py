"""What is known to work: under which changes a command ran, and how often they held."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.journal.queries import KnownGood, forget, known_to_work, last_run, open_journal
from oomguard.journal.store import AttemptRow, Journal, RunIdentity

H100 = RunIdentity("vllm", "0.33.0", "m", "H100")
INCIDENT = {"kind": "cuda_oom", "causes": []}


def patch(old: float, new: float, effect: str = "reduces-capacity") -> dict[str, object]:
    return {"setting": "gpu_memory_utilization", "from": old, "to": new, "effect": effect}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.sqlite3")


def write(
    journal: Journal,
    session: str,
    *attempts: tuple[float | None, int, bool],
    ran: RunIdentity = H100,
    measured=1792,
):
    """One run; an attempt is the share that it was changed to, its exit status, and whether memory failed."""
    share = 0.9
    for number, (new, status, has_incident) in enumerate(attempts, 1):
        patches = (
            []
            if new is None
            else [patch(share, new, "reduces-capacity" if new < share else "output-preserving")]
        )
        settings = {} if new is None else {"gpu_memory_utilization": new}
        share = new or share
        begun = journal.begin(
            AttemptRow(
                session,
                number,
                ["vllm", "serve", "m"],
                settings,
                patches,
                started_at=100.0 + number,
            )
        )
        journal.end(
            begun,
            exit_status=status,
            incident=INCIDENT if has_incident else None,
            measured={"kv_cache_capacity_tokens": measured} if measured else {},
            ran=ran,
            set_by_user={"gpu_memory_utilization": False} if has_incident else None,
        )


def known(journal: Journal) -> list[KnownGood]:
    with open_journal(journal.path) as database:
        assert database is not None
        return known_to_work(database)


def test_successful_changes_are_counted_next_to_failures(journal: Journal):
    write(journal, "a", (None, 1, True), (0.8, 0, False))
    write(journal, "b", (0.8, 0, False))
    write(journal, "c", (0.8, 1, True), (0.7, 0, False))

    found = {known.settings["gpu_memory_utilization"]: known for known in known(journal)}

    assert [
        (share, one.held, one.failed, one.has_failed_since) for share, one in found.items()
    ] == [
        (0.7, 1, 0, False),
        (0.8, 2, 1, True),
    ]


@pytest.mark.parametrize(
    ("status", "measured", "is_known"),
    [
        (0, 0, True),
        (143, 1792, True),
        (130, 1792, True),
        (143, 0, False),
        (1, 1792, False),
        (137, 1792, False),
    ],
)
def test_stopped_server_counts_as_success_if_its_engine_started(
    journal, status, measured, is_known
):
    write(journal, "a", (None, status, False), measured=measured)

    assert bool(known(journal)) == is_known


def test_other_engine_versions_and_devices_are_told_apart(journal: Journal):
    for i, ran in enumerate(
        [H100, RunIdentity("vllm", "0.32.0", "m", "H100"), RunIdentity("vllm", "0.33.0", "m", None)]
    ):
        write(journal, f"s{i}", (0.8, 0, False), ran=ran)

    assert [(one.engine_version, one.device) for one in known(journal)] == [
        ("0.33.0", None),
        ("0.32.0", "H100"),
        ("0.33.0", "H100"),
    ]


def test_a_run_that_is_forgotten_is_not_known(journal: Journal):
    write(journal, "a", (0.8, 0, False))
    write(journal, "b", (0.7, 0, False))
    forget(journal.path, [2])

    assert [one.settings for one in known(journal)] == [{"gpu_memory_utilization": 0.8}]


def test_last_run_shows_the_change_from_the_original_value(
    journal: Journal,
):
    write(journal, "a", (None, 1, True), (0.8, 1, True), (0.85, 0, False))
    with open_journal(journal.path) as database:
        assert database is not None
        run = last_run(database, known_to_work(database)[0])
    changed = run.patches["gpu_memory_utilization"]

    assert (run.number, run.began_at) == (1, 103.0)
    assert (changed.old, changed.new, str(changed.effect)) == (0.9, 0.85, "reduces-capacity")
    assert (run.measured, run.set_by_user) == (
        {"kv_cache_capacity_tokens": 1792},
        {"gpu_memory_utilization": False},
    )


@pytest.mark.parametrize(
    "ran", [RunIdentity("vllm", None, None, "H100"), RunIdentity(None, None, None, "H100"), None]
)
def test_failure_of_unknown_version_counts_for_every_version(journal: Journal, ran):
    write(journal, "a", (0.8, 0, False))
    write(journal, "b", (0.8, 1, True), ran=ran)

    assert [(one.held, one.failed, one.has_failed_since) for one in known(journal)] == [
        (1, 1, True)
    ]


def test_a_failure_of_another_engine_version_does_not_count(journal: Journal):
    write(journal, "a", (0.8, 0, False))
    write(journal, "b", (0.8, 1, True), ran=RunIdentity("vllm", "0.32.0", "m", "H100"))

    assert [(one.failed, one.has_failed_since) for one in known(journal)] == [(0, False)]


@pytest.mark.parametrize(
    ("word", "told", "is_known"),
    [
        ("x", None, True),
        ("***", None, True),
        ("API_KEY=***", None, False),
        ("API_KEY=***", False, False),
        ("API_KEY=***", True, True),
    ],
)
def test_overmasked_command_is_not_a_known_command(journal, word, told, is_known):
    begun = journal.begin(AttemptRow("a", 1, ["sh", word], {}, [], hides_secrets_alone=told))
    journal.end(begun, exit_status=0, incident=None, measured={})

    assert bool(known(journal)) == is_known


@pytest.mark.parametrize("status", [0, 143])
def test_one_that_was_ended_since_it_hung_did_not_hold(journal: Journal, status: int):
    begun = journal.begin(AttemptRow("s", 1, ["vllm", "serve", "m"], {}, []))
    journal.end(
        begun,
        exit_status=status,
        incident=None,
        measured={"x": 1},
        ran=H100,
        error="the server hangs: x",
    )

    assert known(journal) == []
