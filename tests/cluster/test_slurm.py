"""The comment of a SLURM job, with an scontrol of our own; the real SLURM is in test_real_slurm.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oomguard.cluster import slurm
from oomguard.cluster.slurm import SlurmJob, job_of
from support.each import each
from support.supervising import run

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
FAILS = (sys.executable, str(ENGINE), "--max-model-len", "32768")


@pytest.fixture
def scontrol(tmp_path: Path) -> dict[str, str]:
    """A ``scontrol`` that keeps its words."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "scontrol"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen({str(tmp_path / 'words')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
    )
    program.chmod(0o755)
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "squeue").chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}


def test_the_comment_of_the_slurm_job_says_how_it_ended(tmp_path, scontrol):
    run("--slurm-comment", command=FAILS, env=scontrol)
    update, job, comment = json.loads((tmp_path / "words").read_text())
    assert (update, job) == ("update", "JobId=4711")
    assert comment.startswith("Comment=oomguard: ")
    assert "One request of 32,768 tokens needs about 0.02 GiB of KV cache" in comment
    assert comment.endswith("; exit status 1 after 1 attempt")
    assert len(comment.encode()) <= 258
    assert "\n" not in comment


def test_job_with_harmless_rerun_gets_no_comment(tmp_path, scontrol):
    for command in (("true",), ("sh", "-c", "exit 3")):
        run("--slurm-requeue", "2", command=command, env=scontrol)
    assert not (tmp_path / "words").exists()


def test_outside_a_job_it_is_said_and_the_status_stays():
    ran = run("--slurm-comment", command=("sh", "-c", "exit 3"))
    assert ran.returncode == 3
    assert 'The job comment is not set: reason="SLURM_JOB_ID is not set"' in ran.stderr


def test_a_comment_says_a_status_once_and_names_the_signal(tmp_path, scontrol):
    for status, words in (
        ("4", "exit status 4 after 1 attempt"),
        ("137", "exit status 137, signal 9 (KILL) after 1 attempt"),
    ):
        run("--slurm-comment", command=("sh", "-c", f"exit {status}"), env=scontrol)
        assert json.loads((tmp_path / "words").read_text())[2] == f"Comment=oomguard: {words}"


def test_a_comment_that_slurm_refuses_is_told_with_what_it_said(tmp_path, scontrol):
    script = "echo 'Invalid job' >&2; exit 1"
    reason = 'reason="scontrol ended with exit status 1: Invalid job"\n'
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    ran = run("--slurm-comment", command=("sh", "-c", "exit 3"), env=scontrol)
    assert ran.returncode == 3
    assert ran.stderr.endswith(f"The job comment is not set: {reason}")


def test_an_scontrol_that_hangs_is_told_in_words(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(slurm, "_LIMIT_S", 0.2)
    told: list[str] = []
    monkeypatch.setattr(
        slurm,
        "get_logger",
        lambda: SimpleNamespace(warning=lambda _event, reason: told.append(reason)),
    )
    assert not SlurmJob("1", 0, f"{tmp_path}:/usr/bin:/bin").set_comment("x")
    assert told == ["scontrol did not end within 0 s"]


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "refused"])
def test_the_job_goes_back_only_where_slurm_took_it(tmp_path, scontrol, is_taken):
    body = f'case "$1" in requeue) echo "Requested operation is disabled" >&2; exit {int(not is_taken)};; esac'
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
    ran = run(
        "--slurm-requeue",
        "1",
        "--max-attempts",
        "1",
        command=(sys.executable, str(ENGINE)),
        env=scontrol,
    )
    assert ran.returncode == 1
    assert ("Requeuing the job: job=4711 restart=1" in ran.stderr) is is_taken
    refused = 'The job is not requeued: reason="scontrol ended with exit status 1: Requested operation is disabled'
    assert (refused in ran.stderr) is not is_taken


@each(
    ("variables", "number"),
    [
        ({"SLURM_JOB_ID": "10"}, "10"),
        ({"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "2"}, "10_2"),
        ({"SLURM_JOB_ID": "11", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "1"}, "11"),
    ],
)
def test_a_job_is_named_so_that_no_other_is_meant(variables, number):
    assert job_of(variables, "").number == number


def test_heterogeneous_job_has_one_comment_and_requeues_whole():
    """SLURM 22.05: ``update JobId=1`` changes the comments of all components, ``requeue 1+0`` is refused."""
    job = job_of({"SLURM_JOB_ID": "1", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "1"}, "")
    assert (job.number, job.component) == ("1", "1+0")


def test_the_comment_that_is_read_is_that_of_the_job_alone(tmp_path):
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nprintf '1+1 second\\n1+0 proj42; oomguard: x\\n'\n")
    program.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert SlurmJob("1", 0, path, "1+0").comment() == "proj42; oomguard: x"
    program.write_text("#!/bin/sh\necho '10_1 (null)'\n")
    assert SlurmJob("11", 0, path).comment() == ""
