"""A failure that several logs of a Ray session tell is one incident with all its places."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from oomguard.cluster.fleet import (
    IncidentSummary,
    findings_of,
    group_sources,
    merge_repeated,
    summarize_findings,
    summary_json,
)
from oomguard.diagnosis import diagnose
from oomguard.scan.inputs import writer_of

SESSION = Path(__file__).parent / "ray_session"
LOGS = next(SESSION.glob("session_*/logs"))
WORKER = f"session_2026-11-26_18-05-14_1_2/logs/worker-{'ab' * 28}-ffffffff-{{}}.err"


def findings(*paths: Path) -> list[IncidentSummary]:
    return [one for path in paths for one in findings_of(diagnose(path), None)]


def finding(
    source: str, process: str | None = None, message: str = "CUDA out of memory. Tried 16 MiB"
) -> IncidentSummary:
    return IncidentSummary(
        source, 7, process, writer_of(source), "cuda_oom", True, "batch_too_large", "", "torch", None, None, None, None, (), message
    )  # fmt: skip


def test_the_failures_of_a_real_session_are_counted_once_each():
    told = merge_repeated(findings(*sorted(LOGS.iterdir())))
    sources = [one.source.rpartition("/")[2].partition("-")[0] for one in told]
    assert sorted(sources) == [
        "job",
        "worker",
        "worker",
        "worker",
    ]  # the task's error is nowhere but in the driver's output
    assert {one.writer.job for one in told} == {"01000000", "raysubmit_A1"}


def test_another_log_gives_the_failure_if_the_nearest_is_gone():
    for without in ["worker-*", "job-driver-*", "raylet*"]:
        left = sorted(set(LOGS.iterdir()) - set(LOGS.glob(without)))
        assert merge_repeated(findings(*left)), without


def test_place_of_each_repetition_is_named_and_counted():
    driver = "session_2026-11-26_18-05-14_1_2/logs/job-driver-raysubmit_A1.log"
    summary = summarize_findings(
        [finding(driver, "Engine pid=812"), finding(WORKER.format(812))], inputs=9, failed=2
    )
    group = summary.groups[0]
    assert (summary.incidents, group.inputs, group.example.source) == (1, 2, WORKER.format(812))
    assert group_sources(group).endswith(f"\nrepeated: {driver}:7")
    told = json.loads(summary_json(summary))
    assert told["groups"][0]["told_again"] == [{"source": driver, "line": 7}]


def test_driver_output_repeats_the_worker_that_it_names():
    told = merge_repeated([finding("slurm-812.out", "Engine pid=812"), finding(WORKER.format(812))])
    assert [one.source for one in told] == [WORKER.format(812)]


def test_workers_of_another_session_fail_separately():
    others = [
        finding("slurm-812.out", "Engine pid=813"),
        finding("other.log"),
        finding(WORKER.format(7).replace("_1_2", "_3_4")),
    ]
    assert merge_repeated([*others, finding(WORKER.format(812))]) == [
        *others,
        finding(WORKER.format(812)),
    ]


def test_each_worker_that_failed_counts_whatever_the_words():
    assert len(merge_repeated([finding(WORKER.format(pid)) for pid in (1, 2, 3)])) == 3


def test_other_words_are_another_failure():
    told = merge_repeated(
        [
            finding(WORKER.format(812)),
            finding("slurm-812.out", "Engine pid=812", "CUDA out of memory. Tried 8 MiB"),
        ]
    )
    assert len(told) == 2


def test_a_job_of_f_is_unknown_and_the_log_itself_tells_it(tmp_path):
    logs = tmp_path / "session_2026-11-26_18-05-14_1_2" / "logs"
    logs.mkdir(parents=True)
    for pid, first in ((1, ":job_id:02000000\n"), (2, ":job_id:ffffffff\n"), (3, "")):
        text = (
            f"{first}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {pid}.00 GiB.\n"
        )
        (logs / f"worker-{'ab' * 28}-ffffffff-{pid}.err").write_text(text)
    assert [one.writer.job for one in findings(*sorted(logs.iterdir()))] == ["02000000", None, None]
    assert "job" not in writer_of(WORKER.format(1)).words


def test_engine_end_explained_in_another_stream_is_no_failure():
    for output, errors in [
        (WORKER.format(812).replace(".err", ".out"), WORKER.format(812)),
        (WORKER.format(812), "session_2026-11-26_18-05-14_1_2/logs/job-driver-raysubmit_A1.log"),
        ("jobs/slurm-7.out", "jobs/slurm-7.err"),
        ("jobs/slurm-7.out.gz", "jobs/slurm-7.err"),
        ("run_x1b2c3d4/attempt_0/3/stdout.log", "run_x1b2c3d4/attempt_0/3/stderr.log"),
        ("stdout", "stderr"),
    ]:
        dead = replace(
            finding(errors, message="Engine core initialization failed"),
            kind="engine_dead",
            is_oom=False,
        )
        own = replace(
            finding(output, message="KeyError"),
            kind="engine_dead",
            is_oom=False,
            cause="not_memory",
        )
        for cause in (finding(output), own):
            (told,) = merge_repeated([dead, cause])
            assert (told.source, told.told_again) == (output, ((errors, 7),)), (output, errors)


def test_engine_end_next_to_another_jobs_failure_stays():
    for other in [
        "jobs/slurm-8.out",
        "jobs/slurm-7_1.out",
        "slurm-7.out",
        WORKER.format(812),
        "jobs/slurm-7.err",
    ]:
        dead = replace(
            finding("jobs/slurm-7.err", message="Engine core initialization failed"),
            kind="engine_dead",
            is_oom=False,
        )
        assert len(merge_repeated([dead, finding(other)])) == 2, other


def test_memory_monitor_kill_names_the_victim_or_the_raylet():
    logs = "session_2026-11-26_18-05-14_1_2/logs"
    killed, raylet = (
        replace(finding(f"{logs}/{name}", message=words), kind="host_oom", framework="ray")
        for name, words in (
            ("job-driver-raysubmit_A1.log", "killed due to the node running low on memory"),
            ("raylet.out", "OOM kill reason: Memory usage exceeded threshold"),
        )
    )
    (told,) = merge_repeated([raylet, killed])
    assert (told.source, told.told_again) == (killed.source, ((raylet.source, 7),))
    assert merge_repeated([raylet]) == [raylet]
    assert len(merge_repeated([killed, replace(raylet, framework="python")])) == 2
