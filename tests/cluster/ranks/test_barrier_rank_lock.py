"""A rank of a folder is one process: whoever comes as the same rank is refused, and nobody agrees with another job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomguard.cluster.ranks.barrier import RankLock
from oomguard.core.errors import UsageError
from support.supervising import LIMIT_S, RUN, wait_for


def claim(folder: Path, rank: int, size: int = 2) -> RankLock:
    made = RankLock(folder / "place" / "job", rank, size)
    made.take()
    return made


@pytest.fixture
def of_job(monkeypatch):
    """Says of which job of a scheduler the claims are that follow."""
    return lambda number: monkeypatch.setenv("SLURM_JOB_ID", number)


def test_duplicate_rank_is_refused_with_its_process(
    tmp_path,
):
    first = claim(tmp_path, 1)
    with pytest.raises(
        UsageError, match=f"another process is already rank 1 in .*place: pid {os.getpid()} on "
    ) as raised:
        claim(tmp_path, 1)
    assert "--rendezvous DIR/$SLURM_JOB_ID" in raised.value.hint
    assert first.contested() is not None


def test_ranks_of_one_job_share_and_leave_room_for_the_next(tmp_path):
    first, second = claim(tmp_path, 0), claim(tmp_path, 1)
    assert (first.contested(), second.contested(), first.is_last()) == (None, None, False)
    second.release()
    assert first.is_last()
    first.release()
    assert claim(tmp_path, 0).contested() is None


def test_a_whole_job_goes_on_where_another_job_is_refused(tmp_path, of_job):
    of_job("7")
    ranks = [claim(tmp_path, rank) for rank in range(2)]
    of_job("8")
    for rank in range(2):
        with pytest.raises(UsageError):
            claim(tmp_path, rank)
    assert [rank.contested() for rank in ranks] == [None, None]


def test_where_two_jobs_have_mixed_no_rank_goes_on(tmp_path, of_job):
    of_job("7")
    first = claim(tmp_path, 0)
    of_job("8")
    second = claim(tmp_path, 1)
    of_job("7")
    with pytest.raises(UsageError):
        claim(tmp_path, 1)
    for rank in (first, second):
        assert "another job started in" in rank.contested()


def test_rank_claimed_after_a_refusal_knows_of_it(tmp_path, of_job):
    of_job("8")
    claim(tmp_path, 1)
    of_job("7")
    with pytest.raises(UsageError):
        claim(tmp_path, 1)
    assert claim(tmp_path, 0).contested() is not None


def test_a_job_that_has_run_for_a_while_goes_on_whatever_comes(tmp_path):
    ranks = [claim(tmp_path, rank) for rank in range(2)]
    with pytest.raises(UsageError):
        claim(tmp_path, 1)
    for path in (tmp_path / "place" / "job" / "claims").glob("?"):
        os.utime(path, (time.time() - 60,) * 2)
    assert [rank.contested() for rank in ranks] == [None, None]


def test_the_claim_of_a_process_that_was_killed_is_free(tmp_path):
    code = "import sys; from pathlib import Path; from oomguard.cluster.ranks.barrier import RankLock; c = RankLock(Path(sys.argv[1]), 0, 2); c.take(); print(); input()"
    place = tmp_path / "place" / "job"
    with subprocess.Popen(
        [sys.executable, "-c", code, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(UsageError):
            claim(tmp_path, 0)
        other.kill()
        other.wait(LIMIT_S)
        assert claim(tmp_path, 0)


def test_a_folder_that_cannot_be_made_holds_nothing_up(tmp_path):
    (tmp_path / "place").touch()
    assert claim(tmp_path, 0).contested() is None


def test_mixed_jobs_in_one_folder_do_not_wait_for_each_other(tmp_path):
    """Rank 0 is of one job, rank 1 of another; the rank 1 that rank 0 belongs to is refused before its command runs."""
    runs = []
    for name, rank in (("a", 0), ("b", 1), ("a", 1)):
        (tmp_path / name).mkdir(exist_ok=True)
        options = (
            "--rank",
            str(rank),
            "--world-size",
            "2",
            "--rendezvous",
            str(tmp_path / "shared"),
        )
        command = [*RUN, *options, "--", "sh", "-c", "touch ran-$0; exec sleep 300", str(rank)]
        runs.append(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path / name)
        )
        assert len(runs) == 3 or wait_for(
            lambda n=name, r=rank: (tmp_path / n / f"ran-{r}").exists(), LIMIT_S
        )
    try:
        told = [run.communicate(timeout=LIMIT_S)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    assert [run.returncode for run in runs] == [1, 1, 2], told
    assert "another process is already rank 1 in" in told[2]
    assert not (tmp_path / "a" / "ran-1").exists()
    assert all(
        "another job started in" in text and "its own folder" in text for text in told[:2]
    ), told
    assert not list((tmp_path / "shared").iterdir())
