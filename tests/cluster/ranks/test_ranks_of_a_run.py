"""Ranks of one job, each under its own oomguard run: one fails, all start again with one change, or none does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from oomguard.cluster.ranks.rendezvous import free_port
from support.supervising import LIMIT_S


def test_one_failed_rank_restarts_all_with_the_same_patch(job):
    job.start(3, fits={"2": 1792})
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    assert job.lengths() == [[32768, 1792]] * 3
    assert not list(job.folder.glob(".oomguard*"))
    errors = [errors for _, _, errors in ended]
    panels = [sum(line.startswith("oomguard[") for line in text.splitlines()) for text in errors]
    assert panels == [1, 0, 0]
    assert "rank 2: EngineCore pid=2" in errors[0]
    assert "note: first: rank 2" in errors[0]
    assert "Ran with reduced settings" in errors[0]
    assert "Ran with reduced settings" not in errors[1]


def test_fuller_of_two_failed_ranks_decides_for_all(job):
    job.start(3, fits={"0": 4096, "2": 1792})
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 0, 0]
    assert job.lengths() == [[32768, 1792]] * 3
    told = ended[0][2]
    assert "Lower max_model_len from 32768 to 1792" in told
    assert "OOMGUARD_VLLM_OVERRIDES='{\"max_model_len\": 1792}'" in told
    assert "4096}" not in told


def test_no_rank_waits_if_nothing_changes(job):
    options = ("--pin", "max_model_len")
    began_s = time.monotonic()
    job.start(3, *options, fits={"1": 1792})
    ended = job.ended()
    assert time.monotonic() - began_s < 30
    assert [status for status, _, _ in ended] == [1] * 3
    assert "max_model_len_too_large" in ended[0][2]
    assert "rank 1: ran out of memory" in " ".join(ended[0][2].split())
    assert job.lengths() == [[32768]] * 3


def test_a_rank_that_wrote_a_file_lets_no_rank_start_again(job):
    """One rank refuses to repeat what it did: the others would wait for it in vain."""
    (job.folder / "results.jsonl").touch()
    script = job.folder / "writes.sh"
    script.write_text(f'echo row >> {job.folder}/results.jsonl; exec "$@"')
    job.start(2, fits={"1": 1792}, modes={"0": "early"}, after_s="0.5")
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 0], ended


def test_other_failure_ends_only_that_rank_with_its_status(job):
    began_s = time.monotonic()
    job.start(2, modes={"0": "early", "1": "other"})
    ended = job.ended()
    assert [status for status, _, _ in ended] == [0, 1]
    assert "oomguard: Out of memory" not in ended[0][2] + ended[1][2]
    assert time.monotonic() - began_s < 30


def test_a_rank_that_is_killed_leaves_nobody_waiting(job):
    job.start(3, "--rank-timeout", "10s", modes={}, after_s="300")
    job.wait_until_all_run()
    began_s = time.monotonic()
    job.ranks[1].send_signal(signal.SIGKILL)
    ended = job.ended()
    assert time.monotonic() - began_s < 30
    assert [status != 0 for status, _, _ in ended] == [True] * 3
    assert "Rank 1 was killed: no rank restarts" in ended[0][2]
    assert job.lengths() == [[32768]] * 3


def test_report_and_history_name_ranks_first_failure_and_plan(job, tmp_path):
    report, journal = tmp_path / "report.json", tmp_path / "journal.sqlite3"
    job.start(2, "--report", str(report), "--journal", str(journal), fits={"1": 1792})
    job.ended()
    answer = json.loads(report.read_text())
    assert answer["incidents"][0]["location"]["process"].startswith("rank 1")
    assert any(note.startswith("2 ranks.") for note in answer["notes"])

    failed, ran = (attempt["ranks"] for attempt in answer["attempts"])
    assert (failed["size"], failed["first"], failed["ended"]) == (
        2,
        1,
        {"0": "ended", "1": "memory"},
    )
    assert (failed["again"], failed["why_not"]) == (True, None)
    assert [(patch["setting"], patch["to"]) for patch in failed["plan"]] == [
        ("max_model_len", 1792)
    ]
    assert (ran["first"], ran["ended"], ran["plan"]) == (None, {"0": "ran", "1": "ran"}, [])
    for asked in ([], ["1"]):
        history = [
            sys.executable,
            "-m",
            "oomguard",
            "history",
            *asked,
            "--format",
            "json",
            "--journal",
            str(journal),
        ]
        run = json.loads(
            subprocess.run(
                history, capture_output=True, text=True, check=True, timeout=LIMIT_S
            ).stdout
        )
        assert [attempt["ranks"] for attempt in run["attempts"]] == [failed, None]


def test_a_stop_of_the_launcher_starts_no_rank_again(job):
    number = signal.SIGTERM
    job.start(2, "--rank-timeout", "5s", after_s="300")
    job.wait_until_all_run()
    for rank in job.ranks:
        rank.send_signal(number)
    assert [status for status, _, _ in job.ended()] == [128 + number] * 2
    assert job.lengths() == [[32768]] * 2


def test_signal_to_one_rank_ends_no_other(job, tmp_path):
    are_apart = True
    report, place = tmp_path / "report.json", f"tcp://127.0.0.1:{free_port()}" if are_apart else ""
    job.start(
        2,
        "--report",
        str(report),
        rendezvous=place,
        are_apart=are_apart,
        modes={"0": "early", "1": "waits"},
    )
    job.wait_until_all_run()
    job.ranks[1].send_signal(signal.SIGTERM)
    (first, _, errors), (second, _, _) = job.ended()
    assert (first, second) == (0, 143)
    assert "A signal (exit status 143, signal 15 (TERM)) ended rank 1" in errors
    assert "silent" not in errors
    (attempt,) = json.loads(report.read_text())["attempts"]
    assert (attempt["ranks"]["ended"], attempt["ranks"]["silent"]) == (
        {"0": "ran", "1": "stopped"},
        [],
    )
