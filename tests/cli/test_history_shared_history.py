"""run and history with a journal that several share: what is told, delivered, removed, and never shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from oomguard.journal.codec import AttemptRow, RunIdentity
from oomguard.journal.delivery import SharedJournal
from oomguard.journal.location import JournalUrl
from oomguard.journal.outbox import waiting
from oomguard.journal.store import Journal
from support.each import each
from support.supervising import LIMIT_S

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
AWAY = "postgresql://ann:Hunter2correct@127.0.0.1:1/team"
DAY_S = 86400.0


def oomguard(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oomguard", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        **more,
    )


def write(journal: Journal | SharedJournal, session: str, at: float = 0.0, **more: Any) -> None:
    settings = {"max_model_len": 1792}
    patch = {"setting": "max_model_len", "from": 32768, "to": 1792, "effect": "reduces-capacity"}
    words = more.pop("words", ["vllm", "serve", "org/m"])
    begun = journal.begin(
        AttemptRow(
            session,
            1,
            words,
            settings,
            [patch],
            started_at=at,
            who="ann",
            host="node7",
            hides_secrets_alone=True,
            **more,
        )
    )
    journal.end(
        begun,
        exit_status=0,
        incident=None,
        measured={"x": 1},
        ran=RunIdentity("vllm", "0.33.0", "org/m"),
        seconds=9.0,
    )
    assert journal.finish(LIMIT_S) is None


def test_repaired_run_in_the_shared_journal_is_reused(database: str, tmp_path: Path):
    command = [
        "run",
        "--reuse",
        "--allow",
        "reduces-capacity",
        "--journal",
        database,
        "--",
        sys.executable,
        str(ENGINE),
    ]
    first, second = oomguard(*command), oomguard(*command)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "The shared journal did not get these attempts yet" not in first.stderr + second.stderr
    assert 'held="1 of 1 times"' in second.stderr
    rows = [
        json.loads(line)
        for line in oomguard(
            "history", "--journal", database, "--format", "json"
        ).stdout.splitlines()
    ]
    assert [(row["result"], len(row["attempts"])) for row in rows] == [("ran", 1), ("repaired", 2)]
    assert all(row["who"] and row["host"] for row in rows)
    assert list(tmp_path.rglob("*.jsonl")) == []


def test_missing_database_hides_the_password_and_the_run_works(
    tmp_path: Path,
):
    env = {**os.environ, "OOMGUARD_JOURNAL": AWAY}
    ran = oomguard("run", "-v", "--reuse", "--", "sh", "-c", "echo out; exit 3", env=env)
    texts = [
        ran.stderr,
        *(oomguard(*words, env=env).stderr for words in (["history"], ["history", "--deliver"])),
    ]

    assert (ran.returncode, ran.stdout) == (3, "out\n")
    assert (
        "The shared journal did not get these attempts yet; the next run delivers them: attempts=1"
        in ran.stderr
    )
    assert "oomguard history --deliver" in ran.stderr
    assert "No settings reused: the journal cannot be read" in ran.stderr
    assert all("refused" in text and "Traceback" not in text for text in texts), texts
    assert not any("Hunter2correct" in text for text in texts)
    (file,) = waiting(JournalUrl(AWAY).outbox)
    assert b"Hunter2correct" not in file.read_bytes()


def test_every_command_reports_a_foreign_schema_as_no_journal(database: str, postgresql: Any):
    postgresql.sql(
        database.rpartition("/")[2], "CREATE SCHEMA oomguard; CREATE TABLE oomguard.run (id int)"
    )
    at = ("--journal", database)
    ran = oomguard("run", *at, "--reuse", "--", "sh", "-c", "exit 3")
    assert ran.returncode == 3
    assert "The shared journal refused these attempts, so they stay on this machine" in ran.stderr
    assert "the next run delivers" not in ran.stderr
    assert "No settings reused: the journal cannot be read" in ran.stderr
    for words in (
        [],
        ["1"],
        ["--fleet"],
        ["--keep", "1d", "--yes"],
        ["--deliver"],
        ["--forget", "--all", "--yes"],
    ):
        asked = oomguard("history", *at, *words)
        assert asked.returncode == 2, words
        assert (
            "not an oomguard journal: the schema oomguard contains another program's tables (run)"
            in asked.stderr
        ), words
        assert "use another database" in asked.stderr, words


def test_the_password_of_a_file_of_options_is_not_told(tmp_path: Path):
    (tmp_path / "config" / "oomguard").mkdir(parents=True)
    (tmp_path / "config" / "oomguard" / "config.toml").write_text(f"journal = '{AWAY}'\n")
    ran = oomguard("run", "-v", "--", "true")
    assert "The shared journal did not get these attempts yet" in ran.stderr
    assert "Hunter2correct" not in ran.stderr


def test_database_of_another_kind_is_refused_before_the_run(tmp_path: Path):
    ran = oomguard("run", "--journal", "mysql://db/x", "--", "touch", str(tmp_path / "it-ran"))
    assert (ran.returncode, (tmp_path / "it-ran").exists()) == (2, False)
    assert "oomguard cannot keep a journal in mysql" in ran.stderr


def test_what_waits_here_is_delivered_when_asked(database: str):
    shared, away = JournalUrl(database), JournalUrl(AWAY)
    journal = SharedJournal(away)
    journal.begin(AttemptRow("s", 1, ["x"], {}, []))
    assert journal.finish(LIMIT_S) is not None
    (file,) = waiting(away.outbox)
    shared.outbox.mkdir(parents=True)
    file.rename(shared.outbox / file.name)
    (shared.outbox / "later.jsonl").write_text('{"form": 2}\n')

    ran = oomguard("history", "--deliver", "--journal", database)
    assert (ran.returncode, ran.stdout) == (2, "delivered: 1 attempt of 1 run\n")
    assert "later.jsonl: written in form 2 by another oomguard, this one reads 1" in ran.stderr
    (shared.outbox / "later.jsonl").unlink()
    assert (
        oomguard("history", "--deliver", "--journal", database).stdout
        == "delivered: 0 attempts of 0 runs\n"
    )
    assert oomguard("history", "--deliver").returncode == 2


def test_fleet_shows_successes_counts_and_who_measured(database: str):
    for i in range(2):
        write(SharedJournal(JournalUrl(database)), f"s{i}")
    ran = oomguard("history", "--fleet", "--journal", database)
    row = json.loads(
        oomguard("history", "--fleet", "--journal", database, "--format", "json").stdout
    )

    assert all(
        word in ran.stdout
        for word in ("2 of 2", "org/m", "vllm 0.33.0", "max_model_len 1792", "ann@node7 2")
    )
    assert (row["held"], row["failed"], row["settings"]) == (2, 0, {"max_model_len": 1792})
    assert row["measured_by"] == [{"who": "ann", "host": "node7", "attempts": 2}]
    nothing = oomguard("history", "--fleet", "--model", "other", "--journal", database)
    assert (nothing.returncode, nothing.stdout.startswith("no known settings")) == (0, True)


def test_others_measurement_serves_the_same_start(database: str, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "vllm"
    engine.write_text('#!/bin/sh\necho "$@"\n')
    engine.chmod(0o755)
    site = tmp_path / "vllm-0.33.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    write(SharedJournal(JournalUrl(database)), "s", words=["vllm", "serve", "org/m", "--port", "1"])
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
    }
    options = [
        "run",
        "--reuse",
        "--allow",
        "reduces-capacity",
        "--journal",
        database,
        "--",
        "vllm",
        "serve",
        "org/m",
    ]
    same = oomguard(*options, "--served-model-name", "m", "--api-key", "k", env=env)
    other = oomguard(*options, "--kv-cache-dtype", "fp8", env=env)

    assert 'Reusing settings that worked before: max_model_len="32768 -> 1792"' in same.stderr, (
        same.stderr
    )
    assert "by=ann@node7" in same.stderr
    assert "--max-model-len 1792" in same.stdout
    assert "No settings reused" in other.stderr


@pytest.mark.parametrize("kind", ["file", "shared"])
def test_old_runs_are_removed_after_asking(database: str, tmp_path: Path, kind: str):
    place = str(tmp_path / "j") if kind == "file" else database
    for session, days in (("old", 100), ("new", 1)):
        journal = Journal(tmp_path / "j") if kind == "file" else SharedJournal(JournalUrl(database))
        write(journal, session, at=time.time() - days * DAY_S)
    keep = ("history", "--keep", "90d", "--journal", place)

    asked = oomguard(*keep)
    assert (asked.returncode, "confirm with --yes" in asked.stderr) == (2, True)
    assert "1 of 2 runs in" in asked.stdout
    assert oomguard(*keep, "--yes").stdout.endswith("removed: 1 run\n")
    rows = [
        json.loads(line)
        for line in oomguard("history", "--journal", place, "--format", "json").stdout.splitlines()
    ]
    assert [row["session"] for row in rows] == ["new"]
    assert (
        oomguard(*keep, "--yes").stdout == "nothing to remove: all of 1 run ended after that time\n"
    )


def kept(place: str) -> list[dict[str, Any]]:
    listed = oomguard("history", "--journal", place, "--format", "json")
    return [json.loads(line) for line in listed.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["file", "shared"])
def test_running_run_is_kept_and_a_killed_one_is_not(database: str, tmp_path: Path, kind: str):
    place = str(tmp_path / "j") if kind == "file" else database
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        "--journal",
        place,
        "--",
        "sh",
        "-c",
        "read line; exit 3",
    ]
    runs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    live, killed = runs
    try:
        until = time.monotonic() + LIMIT_S
        while len(kept(place)) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        killed.kill()
        killed.wait()
        time.sleep(1.1)
        removed = oomguard("history", "--keep", "1s", "--yes", "--journal", place)
        assert [row["result"] for row in kept(place)] == ["not ended"]
    finally:
        for run in runs:
            run.stdin.close()
        live.wait(LIMIT_S)
        killed.wait(LIMIT_S)

    assert "1 of 2 runs in" in removed.stdout
    assert "also kept: 1 run that may still run" in removed.stdout
    assert [(row["result"], row["exit_status"]) for row in kept(place)] == [("failed", 3)]


@pytest.mark.parametrize("kind", ["file", "shared"])
def test_unfinished_run_of_another_machine_stays_for_90_days(
    database: str, tmp_path: Path, kind: str
):
    place = str(tmp_path / "j") if kind == "file" else database
    for session, days in (("older", 91), ("old", 89)):
        journal = Journal(tmp_path / "j") if kind == "file" else SharedJournal(JournalUrl(database))
        journal.begin(
            AttemptRow(
                session, 1, ["x"], {}, [], started_at=time.time() - days * DAY_S, host="elsewhere"
            )
        )
        assert journal.finish(LIMIT_S) is None

    assert oomguard("history", "--keep", "7d", "--yes", "--journal", place).returncode == 0
    assert [row["session"] for row in kept(place)] == ["old"]
    again = oomguard("history", "--keep", "7d", "--yes", "--journal", place)
    assert (
        again.stdout
        == "nothing to remove: all except 1 that may still run of 1 run ended after that time\n"
    )


@each(
    "arguments",
    [
        ("--fleet", "1"),
        ("--fleet", "--failed"),
        ("--keep", "90"),
        ("--keep", "90d", "--model", "m"),
        ("--deliver", "--yes"),
    ],
)
def test_options_that_do_not_go_together_are_one_message(arguments: tuple[str, ...]):
    ran = oomguard("history", *arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


def test_forgetting_and_doctor_know_a_shared_journal(database: str):
    write(SharedJournal(JournalUrl(database)), "s")
    assert oomguard("history", "--forget", "1", "--yes", "--journal", database).returncode == 0
    assert (
        json.loads(oomguard("history", "1", "--format", "json", "--journal", database).stdout)[
            "forgotten"
        ]
        is True
    )
    checks = [
        json.loads(line)
        for line in oomguard(
            "doctor", "--format", "json", "--journal", database
        ).stdout.splitlines()
    ]
    text = json.dumps(checks)
    assert "1 attempts" in text
