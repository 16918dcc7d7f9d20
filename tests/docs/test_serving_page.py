"""The scripts of the page on serving do what the page says of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.supervising import RUN, wait_for

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8")
SERVER = "#!/bin/bash\necho $$ > {}\n{}\n"


@pytest.fixture
def batch(tmp_path):
    """Start the page's batch script with a vllm that does what it is given, and return its process."""
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", PAGE, re.DOTALL)
    (tmp_path / "job.sh").write_text(script)

    def start(does: str) -> subprocess.Popen[bytes]:
        programs = {"vllm": SERVER.format(tmp_path / "began", does), "scontrol": "#!/bin/sh\n"}
        programs["oomguard"] = f'#!/bin/sh\nexec {sys.executable} -m oomguard "$@"\n'
        (tmp_path / "bin").mkdir()
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "7", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            ["bash", str(tmp_path / "job.sh")], env=env, stderr=subprocess.DEVNULL
        )

    return start


def test_batch_script_ends_with_the_status_of_a_failing_server(batch):
    assert batch("exit 3").wait(60) == 3


@pytest.mark.parametrize(
    ("does", "status"), [("exit 0", 0), ("trap - TERM; kill $$", 143)], ids=["ends", "dies"]
)
def test_slurm_signal_reaches_the_server_with_its_status(batch, tmp_path, does, status):
    with batch(f"trap 'sleep 0.5; {does}' TERM; while :; do sleep 0.1; done") as job:
        assert wait_for((tmp_path / "began").exists, 30)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == status


def test_unit_counts_the_stop_status_of_a_server_as_success():
    (status,) = re.findall(r"^SuccessExitStatus=(\d+)$", PAGE, re.MULTILINE)
    command = [*RUN, "--", "sh", "-c", "echo began; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "began\n"
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == int(status)
