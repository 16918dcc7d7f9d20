"""The exit status that tells a scheduler why a run failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.each import each
from support.supervising import RUN

ENGINE = Path(__file__).parents[1] / "analyst" / "fake_engine.py"
HELD = (
    "ValueError: Free memory on device cuda:0 (3.21/79.25 GiB) on startup is less than desired GPU memory utilization (0.9, 71.33 GiB). "
    "Decrease GPU memory utilization or reduce GPU memory used by other processes."
)


def status(*options: str, command: tuple[str, ...]) -> int:
    words = [*RUN, *options, "--", *command]
    return subprocess.run(words, capture_output=True, timeout=120, check=False).returncode


FAILS = (sys.executable, str(ENGINE), "--max-model-len", "32768")


def test_memory_without_a_permitted_change_is_90():
    assert status("--exit-status", "by-cause", command=FAILS) == 90


@each(
    "options",
    [
        ("--max-attempts", "1"),
        ("--dry-run",),
    ],
)
def test_limit_that_blocks_a_change_keeps_its_own_status(options):
    wait = "sleep 2.1" if "--deadline" in options else ":"
    smaller = "import json, os; print(json.loads(os.environ.get('OOMGUARD_VLLM_OVERRIDES', '{}')).get('max_model_len', 32768) // 2)"
    each_start_finds_half = (
        f'{wait}; exec {sys.executable} {ENGINE} --estimate "$({sys.executable} -c "{smaller}")"'
    )
    assert (
        status("--exit-status", "by-cause", *options, command=("sh", "-c", each_start_finds_half))
        == 1
    )


def test_written_file_that_blocks_a_change_keeps_its_own_status(tmp_path):
    writes = (
        sys.executable,
        str(ENGINE),
        "--count",
        str(tmp_path / "lengths"),
        "--max-model-len",
        "32768",
    )
    allowed = "--exit-status", "by-cause", "--allow", "reduces-capacity"
    assert status(*allowed, command=writes) == 1
    assert (tmp_path / "lengths").read_text() == "32768\n"


def test_memory_that_others_hold_is_91(tmp_path):
    (tmp_path / "log").write_text(
        f"INFO 11-21 07:14:27 [core.py:58] Initializing a V1 LLM engine (v0.11.0) with config\n{HELD}\n"
    )
    fails = ("sh", "-c", f"cat {tmp_path / 'log'}; exit 1")
    assert status("--exit-status", "by-cause", "--max-attempts", "1", command=fails) == 91


@each("code", [3, 137])
def test_what_is_not_memory_keeps_its_own(code):
    assert status("--exit-status", "by-cause", command=("sh", "-c", f"exit {code}")) == code


def test_success_is_0_and_each_status_is_the_commands_own():
    assert status("--exit-status", "by-cause", command=("true",)) == 0
    assert status(command=FAILS) == 1
