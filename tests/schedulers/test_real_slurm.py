"""Jobs of a real SLURM: the line that its queue shows, and a job that goes back to it with its changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.supervising import wait_for

ENGINE = Path(__file__).parents[1] / "supervise" / "fake_engine.py"
RANKED = Path(__file__).parents[1] / "ranks" / "ranked_job.py"
pytestmark = pytest.mark.xdist_group("slurm")  # one cluster for all of these


def script(options: str, command: str = f"{sys.executable} {ENGINE}") -> str:
    return f"#!/bin/bash\nexec oomguard run {options} -- {command}\n"


def test_a_requeued_job_begins_with_the_change_that_its_last_start_left(slurm):
    job = slurm.submit(script("--max-relaunches 0 --slurm-requeue 2"))
    slurm.wait_for_requeue(job)
    assert slurm.told(job, "%k").startswith('oomguard {"max_model_len": 1792}: One request needs about 0.02 GiB')
    assert "the job goes back to its queue: job=" in slurm.output(job)
    slurm.begin_now(job)
    slurm.wait_for(job, "COMPLETED")
    said = slurm.output(job)
    assert "the job goes on with what its last start changed: max_model_len=1792 restart=1" in said
    assert slurm.told(job, "%k") == 'oomguard {"max_model_len": 1792}: ended'


def test_a_job_goes_back_so_often_and_not_oftener(slurm):
    stubborn = f"{sys.executable} {ENGINE} --mode stubborn"
    job = slurm.submit(script("--max-relaunches 0 --slurm-requeue 1", stubborn))
    slurm.wait_for_requeue(job)
    slurm.begin_now(job)
    slurm.wait_for(job, "FAILED")
    assert slurm.told(job, "%r") == "NonZeroExitCode"


def test_a_change_that_is_made_at_once_takes_no_queue(slurm):
    job = slurm.submit(script("--slurm-requeue 2"))
    slurm.wait_for(job, "COMPLETED")
    assert "goes back to its queue" not in slurm.output(job)
    assert slurm.told(job, "%k") == 'oomguard {"max_model_len": 1792}: ended'


def test_the_queue_shows_the_first_attempt_too(slurm):
    job = slurm.submit(script("--slurm-comment", "sleep 60"))
    assert wait_for(lambda: slurm.told(job, "%k") == "oomguard: attempt 1 runs", 60), slurm.output(job)
    slurm.ask("scancel", job)


def test_the_queue_shows_the_attempt_that_runs(slurm):
    waits = f"{sys.executable} {ENGINE} --mode wait"
    job = slurm.submit(script("--slurm-comment", waits))
    assert wait_for(lambda: slurm.told(job, "%k") == "oomguard: attempt 2 runs", 60), slurm.output(job)
    slurm.ask("scancel", job)


def test_a_failure_of_something_else_and_a_stop_leave_the_queue_alone(slurm):
    job = slurm.submit(script("--max-relaunches 0 --slurm-requeue 2", "sh -c 'exit 3'"))
    slurm.wait_for(job, "FAILED")
    assert slurm.told(job, "%k") == "(null)"


def test_a_job_that_may_not_be_requeued_says_why(slurm):
    job = slurm.submit(script("--max-relaunches 0 --slurm-requeue 2"), "--no-requeue")
    slurm.wait_for(job, "FAILED")
    assert "the job is not requeued: reason=scontrol ended with exit status 1:" in slurm.output(job)
    assert "goes back to its queue" not in slurm.output(job)


def test_what_the_scripts_own_words_forbid_is_left_out(slurm):
    job = slurm.submit(script("--max-relaunches 0 --slurm-requeue 2"))
    slurm.wait_for_requeue(job)
    slurm.ask(
        "scontrol", "update", f"JobId={job}", 'Comment=oomguard {"max_model_len": 8, "kv_cache_dtype": "fp8"}: edited'
    )
    slurm.begin_now(job)
    slurm.wait_for(job, "COMPLETED")
    said = slurm.output(job)
    assert "left out of what the job's last start had changed: settings=kv_cache_dtype=fp8 (changes outputs" in said
    assert "max_model_len=8 restart=1" in said


def test_a_task_of_an_array_that_goes_back_leaves_its_siblings_and_the_users_comment_alone(slurm):
    """SLURM takes the number of an array's last task for all its tasks."""
    fails = script("--max-relaunches 0 --slurm-requeue 2").splitlines()[1]
    alone = "if [ $SLURM_ARRAY_TASK_ID = 1 ]; then sleep 4; echo first ran; exit; fi\n"
    job = slurm.submit(
        f"#!/bin/bash\n{alone}{fails}\n", "--array=1-2", "--comment=proj42", f"--output={slurm.folder}/out.%A_%a"
    )
    last = f"{job}_2"
    slurm.wait_for_requeue(last)
    assert slurm.told(last, "%k").startswith('proj42; oomguard {"max_model_len": 1792}: One request needs')
    slurm.wait_for(f"{job}_1", "COMPLETED")
    assert slurm.told(f"{job}_1", "%k") == "proj42"
    slurm.begin_now(last)
    slurm.wait_for(last, "COMPLETED")
    assert slurm.told(last, "%k") == 'proj42; oomguard {"max_model_len": 1792}: ended'
    assert "CANCELLED" not in slurm.output(f"{job}_1")


def test_each_task_of_an_array_keeps_the_comment_that_it_gave_itself(slurm):
    own = "scontrol update JobId=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID Comment=own-$SLURM_ARRAY_TASK_ID\n"
    fails = f"exec oomguard run --max-relaunches 0 --slurm-requeue 2 -- {sys.executable} {ENGINE}\n"
    other = "[ $SLURM_ARRAY_TASK_ID = 2 ] || exec oomguard run --slurm-requeue 2 -- sleep 2\n"
    named = f"--output={slurm.folder}/out.%A_%a"
    job = slurm.submit(f"#!/bin/bash\n{own}{other}{fails}", "--array=1-3", "--comment=proj42", named)
    slurm.wait_for_requeue(f"{job}_2")
    for task in (1, 3):
        slurm.wait_for(f"{job}_{task}", "COMPLETED")
    told = [slurm.told(f"{job}_{task}", "%k") for task in (1, 2, 3)]
    assert (told[0], told[2]) == ("own-1", "own-3")
    assert told[1].startswith('own-2; oomguard {"max_model_len": 1792}: One request needs')
    slurm.ask("scancel", job)


def test_of_ranks_rank_0_puts_the_job_back_and_all_begin_with_the_plan_of_all(slurm, tmp_path):
    where = f"--rendezvous {tmp_path} --max-relaunches 0 --slurm-requeue 2"
    step = f"exec srun --ntasks 3 --overcommit --kill-on-bad-exit oomguard run {where} -- {sys.executable} {RANKED}\n"
    fits = """FITS='{"1": 4096, "2": 1792}'"""
    job = slurm.submit(f"#!/bin/bash\nexport JOB={tmp_path} {fits}\n{step}")
    slurm.wait_for_requeue(job)
    assert slurm.output(job).count("the job goes back to its queue: job=") == 1
    slurm.begin_now(job)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = slurm.output(job)
    assert slurm.told(job, "%T %k") == 'COMPLETED oomguard {"max_model_len": 1792}: ended', said
    lengths = [(tmp_path / f"lengths-{rank}.log").read_text().split() for rank in range(3)]
    assert lengths == [["32768", "1792"]] * 3
    assert said.count("the job goes on with what its last start changed") == 1


@pytest.mark.parametrize("meets", ["an address", "a folder"])
def test_of_a_steps_four_tasks_one_fails_and_all_start_again_with_one_plan(slurm, tmp_path, meets):
    where = f"--rendezvous {tmp_path}" if meets == "a folder" else ""
    address = "export MASTER_ADDR=localhost MASTER_PORT=29531\n" if meets == "an address" else ""
    step = f"exec srun --ntasks 4 --overcommit --label oomguard run {where} -- {sys.executable} {RANKED}\n"
    job = slurm.submit(f"#!/bin/bash\nexport JOB={tmp_path} FITS='{{\"2\": 1792}}'\n{address}{step}")
    slurm.wait_for(job, "COMPLETED", "FAILED")
    said = slurm.output(job)
    assert slurm.told(job, "%T") == "COMPLETED", said
    lengths = [(tmp_path / f"lengths-{rank}.log").read_text().split() for rank in range(4)]
    assert lengths == [["32768", "1792"]] * 4
    assert said.count("╭─ kv_cache_too_small_for_max_len") == 1
    assert "note: first: rank 2" in said
    assert "ranks 0, 1 and 3: ended by oomguard" in said
