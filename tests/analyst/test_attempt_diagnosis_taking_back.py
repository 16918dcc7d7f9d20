"""A shorter length of ours never breaks the run: not below what the command asks, and taken back where a request is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENGINE = Path(__file__).with_name("fake_engine.py")


def run(*engine, options=()):
    command = [
        sys.executable,
        "-m",
        "oomguard",
        "run",
        *options,
        "--",
        sys.executable,
        str(ENGINE),
        *engine,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def said(text):
    return " ".join(text.replace("│", " ").split())


def test_a_length_that_the_command_itself_asks_for_stays(tmp_path):
    ran = run(
        "--input-len",
        "3000",
        "--count",
        str(tmp_path / "count.log"),
        options=("--allow", "reduces-capacity"),
    )
    assert ran.returncode == 1
    assert (tmp_path / "count.log").read_text().split() == ["32768"]
    assert "below the 3000 that the command asks for (--input-len 3000)" in said(ran.stderr)
    assert '"max_model_len": 1792' not in ran.stderr


def test_a_length_that_is_long_enough_for_the_command_is_lowered():
    assert run("--input-len", "1000").returncode == 0


def test_a_change_that_refused_a_request_is_taken_back_and_told(tmp_path):
    ran = run("--mode", "prompt", "--count", str(tmp_path / "count.log"))
    assert ran.returncode == 1
    assert (tmp_path / "count.log").read_text().split() == ["32768", "1792"]
    assert (
        "Rolled back a change, because a request was refused: setting=max_model_len changed_to=1792 needed=3001"
        in ran.stderr
    )
    assert "request refused" in said(ran.stderr)
    assert "The change did not take effect" not in ran.stderr
    last = ran.stderr.split("Rolled back")[1]
    assert "below the 3001 that a request of this run needs" in said(last)


def test_reused_change_that_refuses_a_request_is_not_repeated(tmp_path):
    count = tmp_path / "count.log"
    options = ("--journal", str(tmp_path / "journal"), "--reuse")
    script = tmp_path / "job.sh"
    script.write_text(f'exec {sys.executable} {ENGINE} --count {count} --mode "$MODE"\n')

    def job(mode):
        command = [sys.executable, "-m", "oomguard", "run", *options, "--", "sh", str(script)]
        env = {**os.environ, "MODE": mode}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=200, check=False, env=env
        )

    assert job("").returncode == 0
    ran = job("prompt")

    assert ran.returncode == 1
    assert count.read_text().split() == ["32768", "1792", "1792"]
    assert (
        "A setting from a previous run made the server refuse a request. Run without --reuse, or forget it with oomguard history --forget: setting=max_model_len"
        in ran.stderr
    )
    assert "known to work: run 1 of " in ran.stderr
