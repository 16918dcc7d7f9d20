"""A run inside another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from oomguard.analyst.nested_run import OUTER, innermost_command, options_of_inner_runs, outer_run
from support.each import each

ENGINE = Path(__file__).with_name("fake_engine.py")
OURS = (sys.executable, "-m", "oomguard", "run")


def test_the_inner_run_leaves_the_ladder_to_the_outer_one(tmp_path):
    count = tmp_path / "count.log"
    command = [*OURS, "--", *OURS, "-v", "--", sys.executable, str(ENGINE), "--count", str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert count.read_text().split() == ["32768", "1792"]
    assert "RESULT 1792" in ran.stdout
    assert "Another oomguard run is around this one and does the relaunches" in ran.stderr


def test_a_variable_of_a_run_that_is_over_counts_for_nothing(monkeypatch):
    monkeypatch.setenv(OUTER, "999999999")
    assert outer_run() is None
    monkeypatch.setenv(OUTER, str(os.getpid()))
    assert outer_run() is None
    monkeypatch.setenv(OUTER, str(os.getppid()))  # it is above us, and no run
    assert outer_run() is None
    monkeypatch.setattr("oomguard.supervisor.tree.name_of", lambda _pid: "oomguard-watch")
    assert outer_run() == os.getppid()


@each(
    ("command", "inner"),
    [
        ("oomguard run -- vllm serve m", "vllm serve m"),
        ("/env/bin/oomguard run -q --pin dtype -- vllm serve m -- x", "vllm serve m -- x"),
        ("python3.11 -m oomguard run -- oomguard run -- vllm serve m", "vllm serve m"),
        ("oomguard diagnose -- vllm serve m", "oomguard diagnose -- vllm serve m"),
        ("oomguard run --", "oomguard run --"),
        ("vllm serve m", "vllm serve m"),
        ("python", "python"),
    ],
)
def test_the_command_that_a_run_inside_a_run_starts_in_the_end(command, inner):
    assert innermost_command(tuple(command.split())) == tuple(inner.split())


def test_inner_runs_own_files_are_no_side_effect(tmp_path):
    inner = [
        "--journal",
        "inner.sqlite3",
        f"--report={tmp_path / 'inner.md'}",
        "--metrics",
        "inner.prom",
    ]
    command = [*OURS, "--", *OURS, *inner, "--", sys.executable, str(ENGINE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (tmp_path / "inner.sqlite3").exists()
    assert (ran.returncode, "The command wrote a file" in ran.stderr) == (0, False), ran.stderr
    assert "RESULT 1792" in ran.stdout


@each(
    ("command", "options"),
    [
        (("true",), []),
        (("oomguard", "run", "-q", "--", "true"), [("oomguard", "run", "-q")]),
        (
            ("oomguard", "run", "--", "oomguard", "run", "-v", "--", "x"),
            [("oomguard", "run"), ("oomguard", "run", "-v")],
        ),
        (("oomguard", "run", "--"), []),
    ],
)
def test_options_of_nested_runs_differ_from_the_commands_own(command, options):
    assert list(options_of_inner_runs(command)) == options
