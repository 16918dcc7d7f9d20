"""A start that fails and does not end: it is ended, and remedied as one that ends."""

from __future__ import annotations

import shlex
import subprocess
import time
from pathlib import Path

from support.supervising import LIMIT_S, RUN, hooked

LOG = shlex.quote(str(Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"))
# Twenty seconds are too long for a test.
SOON = """
import oomguard.analyst.hung_start as module
module.LOOK_S = 0.3
module.HungStart.__init__.__defaults__ = (1.0, *module.HungStart.__init__.__defaults__[1:])
"""


def run(code: str, tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    env = {**hooked(tmp_path, SOON), "XDG_STATE_HOME": str(tmp_path / "state")}
    began_s = time.monotonic()
    command = [*RUN, *options, "--", "sh", "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_S, env=env, cwd=tmp_path
    )
    return ran, time.monotonic() - began_s


def test_it_is_ended_and_run_again_with_the_change(tmp_path):
    code = f'if [ -n "$OOMGUARD_VLLM_OVERRIDES" ]; then echo AGAIN; exit 0; fi; cat {LOG}; exec sleep 100'
    ran, took_s = run(code, tmp_path, "--allow", "reduces-capacity")

    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "AGAIN"), ran.stderr
    assert "its start failed" in ran.stderr
    assert took_s < 60


def test_where_nothing_is_left_to_change_the_run_has_failed(tmp_path):
    ran, _ = run(f"cat {LOG}; exec sleep 100", tmp_path, "--max-relaunches", "0")
    assert ran.returncode == 1


def test_one_that_goes_on_is_left_alone(tmp_path):
    ran, _ = run("echo loading; sleep 3; echo up; exit 4", tmp_path)
    assert (ran.returncode, ran.stdout) == (4, "loading\nup\n")

    ran, _ = run(
        f"cat {LOG}; for i in 1 2 3 4 5 6; do echo retrying $i; sleep 0.5; done; exit 0", tmp_path
    )
    assert "retrying 6" in ran.stdout
    assert "its start failed" not in ran.stderr
