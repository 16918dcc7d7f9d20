"""A server that oomguard ended, since it hung or its engine was gone: how the run ends, and what is remembered of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from oomguard.journal.known_good import known_to_work
from oomguard.journal.read import open_journal

RESTARTED = ("--hang-after", "2", "--restart", "on-failure")
DIES_OF_TERM = ("--dies-of-term",)


def history(journal: Path, *options: str) -> list[dict]:
    command = [sys.executable, "-m", "oomguard", "history", "--journal", str(journal), "--format", "json", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def hang(served) -> None:
    served.wait_for("the server answers")
    served.order("stuck")
    served.request()
    served.wait_for("the server hangs")


def test_a_hang_that_ends_the_run_is_a_failure_of_status_1_in_the_journal_and_the_metrics(serve, tmp_path):
    flags = DIES_OF_TERM
    journal, metrics = tmp_path / "journal", tmp_path / "m.prom"
    counted = ("--metrics", str(metrics)) if importlib.util.find_spec("prometheus_client") else ()
    served = serve(*RESTARTED, "--max-per-hour", "0", "--journal", str(journal), *counted, flags=flags)
    hang(served)

    assert served.process.wait(60) == 1
    (run,) = history(journal, "--failed")
    assert run["result"] == "failed"
    assert run["attempts"][0]["error"].startswith("the server hangs: a request has waited for")
    with open_journal(journal) as database:
        assert known_to_work(database) == []
    if counted:
        assert "oomguard_failed_attempts_total 1.0" in metrics.read_text()


def test_the_reason_of_an_attempt_that_hung_and_was_started_again_is_kept(serve, tmp_path):
    journal = tmp_path / "journal"
    served = serve(*RESTARTED, "--journal", str(journal), flags=DIES_OF_TERM)
    hang(served)
    served.forget("stuck")
    why = served.wait_for("running again as it was")["why"]
    served.wait_for("the server answers", 2)
    assert served.end() == 143  # a stop from outside

    (run,) = history(journal)
    assert [one["result"] for one in run["attempts"]] == ["failed", "stopped"]
    assert [one["error"] for one in run["attempts"]] == [why, "exit status 143, signal 15 (TERM)"]


def test_a_server_whose_engine_is_gone_ends_the_run_with_1_whatever_it_dies_of(serve, tmp_path):
    journal = tmp_path / "journal"
    served = serve("--hang-after", "2", "--journal", str(journal), flags=DIES_OF_TERM)
    served.wait_for("the server answers")
    served.order("dead")

    assert served.process.wait(90) == 1
    (run,) = history(journal, "--failed")
    assert run["attempts"][0]["error"].startswith("the engine is gone: ")
