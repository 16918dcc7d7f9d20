"""``--restart on-failure``: a server that failed of something else than memory runs again as it was."""

from __future__ import annotations

import signal
import subprocess

from oomguard.journal.store import Journal
from support.supervising import RUN

RESTARTED = ("--restart", "on-failure")


def test_it_is_started_again_after_a_pause_until_it_serves(serve, tmp_path):
    served = serve(*RESTARTED, "--journal", str(tmp_path / "journal"), flags=("--fails", "2"))
    served.wait_for("the server answers")
    assert served.starts() == 3
    began = [float(line) for line in (tmp_path / "starts").read_text().split()]
    assert began[1] - began[0] >= 1
    assert began[2] - began[1] >= 2
    assert [event["why"] for event in served.told("Running the command again unchanged")] == [
        "exit status 3"
    ] * 2
    assert served.end() == 0
    assert [record.exit_status for record in Journal(tmp_path / "journal").records()] == [3, 3, 0]


def test_by_default_nothing_is_started_again(serve):
    served = serve(flags=("--fails", "9"))
    assert served.process.wait(60) == 3
    assert served.starts() == 1


def test_a_script_that_wrote_a_file_is_not_started_again(tmp_path):
    script = "echo x >> results; sleep 0.3; exit 3"
    ran = subprocess.run(
        [*RUN, *RESTARTED, "--", "sh", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 3
    assert (tmp_path / "results").read_text() == "x\n"
    assert "Not retried, because it would repeat its side effects" in ran.stderr


def test_a_stop_while_it_waits_to_start_again_is_a_stop(serve):
    number = signal.SIGTERM
    served = serve(*RESTARTED, flags=("--fails", "9"))
    served.wait_for("Waiting before the next attempt", 2)
    served.process.send_signal(number)
    assert served.process.wait(30) == 128 + number
    assert served.starts() == 2
