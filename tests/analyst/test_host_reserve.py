"""A host whose memory runs out: the command is stopped before, and run again with less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.host_limits import kernel_kills, limited_group, wrapped
from support.supervising import LIMIT_S, RUN

LIMIT_MIB = 640
HOG = """
import mmap, signal, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
memory = mmap.mmap(-1, 2 << 30)
for at in range(0, 2 << 30, 1 << 20):
    for page in range(at, at + (1 << 20), 4096):
        memory[page] = 1
    time.sleep(0.001)
"""


@pytest.fixture
def group():
    with limited_group(LIMIT_MIB) as folder:
        if folder is None:
            pytest.skip("this user may not make a control group")
        yield folder


def run(group: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        wrapped(group, [*RUN, *words]),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )


def test_the_command_is_stopped_before_the_kernel_kills(tmp_path, group):
    for words, status in (((), 143), (("deaf",), 137), (("polite",), 1)):
        report = tmp_path / "report.json"
        ran = run(group, tmp_path, "--report", str(report), "--", sys.executable, "-c", HOG, *words)
        assert ran.returncode == status, ran.stderr
        assert "Stopping the command before host memory runs out" in ran.stderr
        found = json.loads(report.read_text())
        incident = found["incidents"][0]
        assert (incident["kind"], incident["causes"][0]["rule"]) == ("host_oom", "OG412")
        assert incident["facts"]["host_limit_bytes"] == LIMIT_MIB << 20
        assert any(note.startswith("Memory left: ") for note in found["notes"])
    assert kernel_kills(group) == 0


def test_an_engine_on_the_cpu_is_run_again_with_what_fits(tmp_path, group):
    program = tmp_path / "vllm"
    fake = Path(__file__).with_name("fake_cpu_engine.py").read_text()
    program.write_text(f"#!{sys.executable}\n{fake}")
    program.chmod(0o755)
    count = tmp_path / "count"
    ran = run(group, tmp_path, "--", str(program), "serve", "./none", "--count", str(count))

    assert ran.returncode == 0, ran.stderr
    first, second = map(float, count.read_text().split())
    assert (first, second < 0.05) == (0.92, True)
    assert ran.stdout.splitlines()[-1] == f"RESULT {second}"
    assert kernel_kills(group) == 0


def test_zero_turns_the_reserve_off(tmp_path, group):
    ran = run(group, tmp_path, "--host-reserve", "0", "--", sys.executable, "-c", HOG)
    assert ran.returncode == 137
    assert "Stopping the command" not in ran.stderr
    assert kernel_kills(group) == 1


def test_a_size_needs_a_unit(tmp_path):
    ran = subprocess.run(
        [*RUN, "--host-reserve", "24", "--", "true"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "write 4GiB" in ran.stderr
