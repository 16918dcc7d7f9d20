"""The rank of a line that srun labelled: told where labels are sure, and not read from any number before a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomguard.core.incident import Diagnosis, Evidence, Incident, Location
from oomguard.diagnosis import diagnose
from oomguard.scan.incidents import with_labels

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
TOO_LOW = Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"


def process(source: str, *lines: str, named: str | None = None) -> str | None:
    evidence = tuple(Evidence(text, number) for number, text in enumerate(lines, 1))
    incident = Incident("cuda_oom", OOM, location=Location(1, 0, named), evidence=evidence)
    return with_labels(Diagnosis(source, (incident,))).incidents[0].location.process


@pytest.mark.parametrize(
    "source", ["slurm-7.out", "jobs/slurm-7_2.out-20261120", "s3://jobs/slurm-7.out.gz"]
)
def test_in_a_job_s_output_the_number_before_a_line_is_its_rank(source: str):
    assert process(source, f"3: {OOM}") == "rank 3"
    assert (
        process(source, f" 12: (EngineCore pid=7) {OOM}", named="EngineCore pid=7")
        == "rank 12: EngineCore pid=7"
    )


def test_two_lines_of_the_failure_must_agree_elsewhere():
    assert process("a.log", f"3: {OOM}", "3: INFO 11-25 09:14:40 x") == "rank 3"
    assert process("a.log", f"3: {OOM}") is None
    assert process("a.log", f"7: {OOM}", "3: INFO 11-25 09:14:40 x") is None


def test_a_rank_that_the_line_names_stays():
    assert process("slurm-7.out", f"3: [rank5]: {OOM}", named="rank5") == "rank5"


def test_a_line_without_a_label_keeps_its_process():
    assert process("slurm-7.out", OOM, named="Worker pid=7") == "Worker pid=7"


def test_labelled_log_reads_like_an_unlabelled_one_plus_ranks(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text("".join(f"3: {line}\n" for line in TOO_LOW.read_text().splitlines()))
    (plain,), (labelled,) = diagnose(TOO_LOW).incidents, diagnose(log).incidents
    assert (labelled.kind, labelled.plan) == (plain.kind, plain.plan)
    assert labelled.location.process == f"rank 3: {plain.location.process}"
