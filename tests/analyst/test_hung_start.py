"""A start that fails and does not end: it is ended, and remedied as one that ends."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from support.supervising import LIMIT_S, RUN, hooked

LOG = Path(__file__).parents[2] / "examples" / "logs" / "vllm_serve_kv_cache.log"
QUOTED_LOG = shlex.quote(str(LOG))
# Twenty seconds are too long for a test.
SOON = """
import oomguard.analyst.hung_start as module
module.LOOK_S = 0.3
module.HungStart.__init__.__defaults__ = (1.0, *module.HungStart.__init__.__defaults__[1:])
"""


def run(
    command: list[str], tmp_path: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    env = {**hooked(tmp_path, SOON), "XDG_STATE_HOME": str(tmp_path / "state")}
    began_s = time.monotonic()
    ran = subprocess.run(
        [*RUN, *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=env,
        cwd=tmp_path,
    )
    return ran, time.monotonic() - began_s


def hanging_server(tmp_path: Path) -> list[str]:
    """A `vllm serve` that prints a failed start and waits, unless it is started with a change."""
    program = tmp_path / "vllm"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "if os.environ.get('OOMGUARD_VLLM_OVERRIDES') or '--max-model-len' in sys.argv:\n"
        "    sys.exit(print('AGAIN'))\n"
        f"print(open({str(LOG)!r}).read(), flush=True)\n"
        "time.sleep(100)\n"
    )
    program.chmod(0o755)
    return [str(program), "serve", "a-model"]


def test_it_is_ended_and_run_again_with_the_change(tmp_path):
    ran, took_s = run(hanging_server(tmp_path), tmp_path, "--allow", "reduces-capacity")

    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "AGAIN"), ran.stderr
    assert "its start failed" in ran.stderr
    assert took_s < 60


def test_where_nothing_is_left_to_change_the_run_has_failed(tmp_path):
    ran, _ = run(hanging_server(tmp_path), tmp_path, "--max-attempts", "1")
    assert ran.returncode == 1


def test_a_command_without_an_engine_is_left_alone(tmp_path):
    for code in (
        f"cat {QUOTED_LOG}; sleep 4; echo DONE",
        f"tail -n 100 {QUOTED_LOG}; sleep 4; echo DONE",
    ):
        ran, _ = run(["sh", "-c", code], tmp_path)
        assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "DONE"), ran.stderr
        assert ran.stdout.count("DONE") == 1


def test_a_log_that_is_shown_is_no_failure_of_the_command(tmp_path):
    ran, _ = run(["cat", str(LOG)], tmp_path)
    assert (ran.returncode, ran.stdout) == (0, LOG.read_text())


def test_one_that_goes_on_is_left_alone(tmp_path):
    ran, _ = run(["sh", "-c", "echo loading; sleep 3; echo up; exit 4"], tmp_path)
    assert (ran.returncode, ran.stdout) == (4, "loading\nup\n")

    code = f"cat {QUOTED_LOG}; for i in 1 2 3 4 5 6; do echo retrying $i; sleep 0.5; done; exit 0"
    ran, _ = run(["sh", "-c", code], tmp_path)
    assert "retrying 6" in ran.stdout
    assert "its start failed" not in ran.stderr


def test_only_the_logs_of_a_container_are_texts_of_others():
    from oomguard.analyst.attempt_diagnosis import ends_by_printing_texts

    for argv in (["docker", "logs", "-f", "x"], ["kubectl", "logs", "pod"], ["cat", "a.log"]):
        assert ends_by_printing_texts(argv), argv
    for argv in (["docker", "run", "vllm/vllm-openai"], ["vllm", "serve", "m"], ["python", "a.py"]):
        assert not ends_by_printing_texts(argv), argv
