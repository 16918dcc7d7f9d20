"""A command that compares or searches texts prints other people's failures."""

from __future__ import annotations

import subprocess

from oomguard.analyst.attempt_diagnosis import only_compares_texts
from support.each import each
from support.supervising import LIMIT_S, RUN

WORDS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@each(
    ("argv", "does"),
    [
        (["diff", "old.log", "new.log"], True),
        (["env", "LC_ALL=C", "/usr/bin/grep", "-n", "memory", "old.log", "missing.log"], True),
        (["bash", "-c", "grep -n memory old.log && exit 1"], True),
        (["sh", "-c", "vllm serve ./model 2>&1 | grep memory"], False),
        (["sh", "-c", "cat old.log; exit 1"], False),
        (["exit"], False),
        (["python", "diff.py"], False),
    ],
)
def test_what_it_runs_tells(argv, does):
    assert only_compares_texts(argv) is does


def test_a_difference_in_old_logs_is_no_failure(tmp_path):
    (tmp_path / "old.log").write_text(WORDS + "\n")
    command = ["diff", "/dev/null", "old.log"]
    ran = subprocess.run(
        [*RUN, "--", *command], capture_output=True, cwd=tmp_path, timeout=LIMIT_S, check=False
    )
    assert (ran.returncode, ran.stderr) == (1, b"")
    assert WORDS.encode() in ran.stdout
