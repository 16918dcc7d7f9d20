"""Which rank a failure is of: by srun's labels, by torchrun's table of failures, by neither."""

from __future__ import annotations

from oomguard.analyst.attempt_diagnosis import with_ranks
from oomguard.core.incident import Diagnosis, Evidence, Incident, Location
from support.each import each

FAILED = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
# As torchrun of torch 2.13 printed it, without what stands between.
TABLE = f"""\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
rec.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-26_06:30:27
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 26076)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 26076
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-26_06:30:27
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 26084)
  error_file: /tmp/torchelastic_x/attempt_0/1/error.json
  traceback : Traceback (most recent call last):
      raise error
  {FAILED}
============================================================
"""
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "rec.py")


def process(line: str, tail: str, argv: tuple[str, ...], known: str | None = None) -> str | None:
    incident = Incident(
        "cuda_oom", FAILED, location=Location(1, 0, known), evidence=(Evidence(line, 1),)
    )
    return with_ranks(Diagnosis("", (incident,)), tail, argv).incidents[0].location.process


def test_torchruns_table_names_the_rank_of_what_it_repeats():
    assert process(f"  {FAILED}", TABLE, TORCHRUN) == "rank 1"


def test_a_failure_that_the_table_does_not_hold_has_no_rank():
    assert process("torch.OutOfMemoryError: another one", TABLE, TORCHRUN) is None


def test_a_process_that_the_line_names_stays():
    assert process(f"[rank3]: {FAILED}", TABLE, TORCHRUN, known="rank3") == "rank3"


@each(
    ("argv", "named"), [(("srun", "-l", "python", "a.py"), "rank 12"), (("python", "a.py"), None)]
)
def test_number_before_a_line_is_a_rank_with_srun_labels(argv, named):
    assert process(f"12: {FAILED}", "", argv) == named


def test_rank_precedes_the_process_on_a_labelled_line():
    line = f"3: (EngineCore pid=7) {FAILED}"
    assert (
        process(line, "", ("srun", "-l", "python", "a.py"), known="EngineCore pid=7")
        == "rank 3: EngineCore pid=7"
    )
