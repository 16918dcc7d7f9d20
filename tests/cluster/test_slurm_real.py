"""Jobs of a real SLURM: the line that its queue shows, and a job that goes back to it with its changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.supervising import wait_for

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
RANKED = Path(__file__).parent / "ranks" / "ranked_job.py"
pytestmark = pytest.mark.xdist_group("slurm")  # one cluster for all of these


def script(options: str, command: str = f"{sys.executable} {ENGINE}") -> str:
    return f"#!/bin/bash\nexec oomguard run {options} -- {command}\n"


def test_requeued_job_begins_with_its_last_change(slurm):
    job = slurm.submit(script("--max-attempts 1 --slurm-requeue 2"))
    slurm.wait_for_requeue(job)
    assert slurm.told(job, "%k").startswith(
        'oomguard {"max_model_len": 1792}: One request of 32,768 tokens needs about'
    )
    assert "Requeuing the job: job=" in slurm.output(job)
    slurm.begin_now(job)
    slurm.wait_for(job, "COMPLETED")
    said = slurm.output(job)
    assert (
        "Beginning with the changes of the job's last start: max_model_len=1792 restart=1" in said
    )
    assert slurm.told(job, "%k") == 'oomguard {"max_model_len": 1792}: ended'


def test_a_job_goes_back_so_often_and_not_oftener(slurm):
    stubborn = f"{sys.executable} {ENGINE} --mode stubborn"
    job = slurm.submit(script("--max-attempts 1 --slurm-requeue 1", stubborn))
    slurm.wait_for_requeue(job)
    slurm.begin_now(job)
    slurm.wait_for(job, "FAILED")
    assert slurm.told(job, "%r") == "NonZeroExitCode"


def test_the_queue_shows_the_attempt_that_runs(slurm):
    waits = f"{sys.executable} {ENGINE} --mode wait"
    job = slurm.submit(script("--slurm-comment", waits))
    assert wait_for(lambda: slurm.told(job, "%k") == "oomguard: attempt 2 is running", 60), (
        slurm.output(job)
    )
    slurm.ask("scancel", job)


def test_other_failure_or_stop_leaves_the_queue_alone(slurm):
    job = slurm.submit(script("--max-attempts 1 --slurm-requeue 2", "sh -c 'exit 3'"))
    slurm.wait_for(job, "FAILED")
    assert slurm.told(job, "%k") == "(null)"


def test_a_job_that_may_not_be_requeued_says_why(slurm):
    job = slurm.submit(script("--max-attempts 1 --slurm-requeue 2"), "--no-requeue")
    slurm.wait_for(job, "FAILED")
    assert 'The job is not requeued: reason="scontrol ended with exit status 1:' in slurm.output(
        job
    )
    assert "goes back to its queue" not in slurm.output(job)


def test_one_of_four_tasks_fails_and_all_restart_with_one_plan(slurm, tmp_path):
    meets = "an address"
    where = f"--rendezvous {tmp_path}" if meets == "a folder" else ""
    address = "export MASTER_ADDR=localhost MASTER_PORT=29531\n" if meets == "an address" else ""
    step = f"exec srun --ntasks 4 --overcommit --label oomguard run {where} -- {sys.executable} {RANKED}\n"
    job = slurm.submit(
        f"#!/bin/bash\nexport JOB={tmp_path} FITS='{{\"2\": 1792}}'\n{address}{step}"
    )
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = slurm.output(job)
    assert slurm.told(job, "%T") == "COMPLETED", said
    lengths = [(tmp_path / f"lengths-{rank}.log").read_text().split() for rank in range(4)]
    assert lengths == [["32768", "1792"]] * 4
    assert said.count("oomguard[OG201]: ") == 1
    assert "note: first: rank 2" in said
    assert "ranks 0, 1 and 3: ended by oomguard" in said
