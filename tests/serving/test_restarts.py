"""``--restart on-failure``: a server that failed of something else than memory runs again as it was."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from oomguard.journal.store import Journal
from support.supervising import RUN, wait_for

RESTARTED = ("--restart", "on-failure")


def test_it_is_started_again_after_a_pause_until_it_serves(serve, tmp_path):
    served = serve(*RESTARTED, "--journal", str(tmp_path / "journal"), flags=("--fails", "2"))
    served.wait_for("the server answers")
    assert served.starts() == 3
    began = [float(line) for line in (tmp_path / "starts").read_text().split()]
    assert began[1] - began[0] >= 1
    assert began[2] - began[1] >= 2
    assert [event["why"] for event in served.told("running again as it was")] == ["exit status 3"] * 2
    assert served.end() == 0
    assert [record.exit_status for record in Journal(tmp_path / "journal").records()] == [3, 3, 0]


def test_three_starts_that_end_alike_are_a_crash_loop_and_the_run_ends(serve):
    served = serve(*RESTARTED, flags=("--fails", "9"))
    assert served.process.wait(60) == 3
    assert served.starts() == 3
    loop = served.wait_for("crash loop")
    assert loop["what"] == "3 starts in a row, each ended of the same: exit status 3"
    assert loop["ran_for"].count(" s") == 3
    assert served.told("not run again: another start would end alike")


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
    assert "not run again: it would repeat from the beginning what it did" in ran.stderr


def test_a_stop_while_it_waits_to_start_again_is_a_stop(serve):
    number = signal.SIGTERM
    served = serve(*RESTARTED, flags=("--fails", "9"))
    served.wait_for("waiting before the next attempt", 2)
    served.process.send_signal(number)
    assert served.process.wait(30) == 128 + number
    assert served.starts() == 2


def test_slurm_s_signals_before_the_limit_reach_the_server(tmp_path):
    """``sbatch --signal=USR1@60``, and SIGTERM at the limit."""
    number = signal.SIGUSR1
    script = f"trap 'echo heard; exit 0' {number.name.removeprefix('SIG')}; echo ready; while :; do sleep 0.1; done"
    with subprocess.Popen([*RUN, *RESTARTED, "--", "bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "heard\n"
        assert process.wait(30) == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a PID namespace of its own needs root here"
)
def test_as_pid_1_of_a_container_it_watches_restarts_and_ends_all(serve):
    served = serve(
        *RESTARTED, "--hang-after", "2", prefix=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    )
    served.wait_for("the server answers")
    below = psutil.Process(served.process.pid).children(recursive=True)
    first = next(one for one in below if "oomguard" in one.cmdline())
    assert "\t1\n" in next(
        line + "\n" for line in Path(f"/proc/{first.pid}/status").read_text().splitlines() if line.startswith("NSpid")
    )
    core = next(one for one in below if one.cmdline() and one.cmdline()[0] == "VLLM::EngineCore")
    core.send_signal(signal.SIGSTOP)
    served.wait_for("running again as it was")
    served.wait_for("the server answers", 2)
    children = first.children(recursive=True)
    first.send_signal(signal.SIGTERM)
    assert wait_for(lambda: not any(one.is_running() for one in children))
    served.process.wait(30)
