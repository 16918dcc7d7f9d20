"""A server that oomguard ended, since it hung or its engine was gone: how the run ends, and what is remembered of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from oomguard.journal.queries import known_to_work, open_journal

RESTARTED = ("--hang-after", "2", "--restart", "on-failure")
DIES_OF_TERM = ("--dies-of-term",)


def history(journal: Path, *options: str) -> list[dict]:
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "history",
        "--journal",
        str(journal),
        "--format",
        "json",
        *options,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def hang(served) -> None:
    served.wait_for("the server answers")
    served.order("stuck")
    served.request()
    served.wait_for("the server hangs")


def test_hang_is_a_failure_of_status_1_in_journal_and_metrics(serve, tmp_path):
    flags = DIES_OF_TERM
    journal, metrics = tmp_path / "journal", tmp_path / "m.prom"
    counted = ("--metrics", str(metrics)) if importlib.util.find_spec("prometheus_client") else ()
    served = serve(
        *RESTARTED, "--max-per-hour", "0", "--journal", str(journal), *counted, flags=flags
    )
    hang(served)

    assert served.process.wait(60) == 1
    (run,) = history(journal, "--failed")
    assert run["result"] == "failed"
    assert run["attempts"][0]["error"].startswith("the server hangs: a request has waited for")
    with open_journal(journal) as database:
        assert known_to_work(database) == []
    if counted:
        assert "oomguard_failed_attempts_total 1.0" in metrics.read_text()
