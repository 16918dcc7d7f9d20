"""A status of 0 ends the run only where the engine's own log does not say that it died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oomguard.journal.store import Journal

SERVER = Path(__file__).with_name("fake_server.py")


def run(
    tmp_path: Path, *options: str, mode: str = "full"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The run, and the share of the card that each start of the server had."""
    count = tmp_path / "count.log"
    command = [sys.executable, str(SERVER), "--mode", mode, "--count", str(count)]
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "oomguard",
            "run",
            "--journal",
            str(tmp_path / "journal"),
            *options,
            "--",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return ran, count.read_text().split()


def test_server_dead_from_memory_is_remedied_despite_status_0(tmp_path):
    ran, shares = run(tmp_path, "--allow", "reduces-capacity")
    assert ran.returncode == 0, ran.stderr
    assert "RESULT" in ran.stdout
    assert shares[0] == "0.9"
    assert len(shares) == 2
    first, second = Journal(tmp_path / "journal").records()
    assert (first.exit_status, first.incident["kind"]) == (0, "cuda_oom")
    assert (second.exit_status, second.incident) == (0, None)


def test_where_nothing_is_left_to_do_the_run_failed(tmp_path):
    ran, shares = run(tmp_path)
    assert (ran.returncode, len(shares)) == (1, 1)
    assert "CUDA out of memory" in ran.stderr
    assert "Ran with reduced settings" not in ran.stderr


def test_death_without_a_logged_cause_is_reported_as_failed_run(tmp_path):
    ran, shares = run(tmp_path, mode="worker")
    assert (ran.returncode, len(shares)) == (1, 1), ran.stderr
    assert "kind=engine_dead" in ran.stderr
    (record,) = Journal(tmp_path / "journal").records()
    assert record.incident["kind"] == "engine_dead"


@pytest.mark.parametrize(
    "mode",
    [
        "failed request",
        "started again",
        "handled",
    ],
)
def test_what_only_looks_like_a_death_ends_well(tmp_path, mode):
    ran, shares = run(tmp_path, "--allow", "changes-outputs", mode=mode)
    assert (ran.returncode, len(shares)) == (0, 1), ran.stderr
    (record,) = Journal(tmp_path / "journal").records()
    assert record.incident is None
