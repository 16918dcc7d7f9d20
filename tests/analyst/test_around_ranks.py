"""oomguard run around a launcher of ranks: the first cause over all of them, in one stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.supervising import LIMIT_S, RUN

ENGINE = Path(__file__).with_name("fake_engine.py")
# As `srun --label` prints: rank 1 runs out of memory, then rank 0 loses it, and its traceback stands last.
LAUNCHER = """
import subprocess, sys
ran = subprocess.run([sys.executable, {engine!r}], capture_output=True, text=True)
print("".join(f"1: {{line}}\\n" for line in (ran.stdout + ran.stderr).splitlines()), end="", flush=True)
if ran.returncode:
    print("0: Traceback (most recent call last):", "0:   File 'job.py', line 22, in <module>", "0:     dist.barrier()", sep="\\n")
    print("0: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited")
sys.exit(ran.returncode)
"""


def test_rank_that_only_lost_another_is_not_the_cause(tmp_path):
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER.format(engine=str(ENGINE)).replace("\\\\n", "\\n"))
    ran = subprocess.run(
        [*RUN, "--", sys.executable, str(launcher)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1: RESULT 1792" in ran.stdout
    assert ran.stderr.count("oomguard: Out of memory") == 1
