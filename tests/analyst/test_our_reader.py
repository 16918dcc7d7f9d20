"""A command that ends of the pipe that our own reader has closed (``| head``): no failure of its own, nothing to explain."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.supervising import LIMIT_S, QUIET, RUN


@pytest.fixture
def env(tmp_path):
    """What makes a diagnosis end the run with 125."""
    code = "import sys\nimport oomguard.analyst.output as h\ndef broken(*_): raise ZeroDivisionError('diagnosed')\nh.hear = broken\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def ended(command: list[str], env: dict[str, str], stdout: int) -> tuple[int, bytes]:
    ran = subprocess.run(
        [*RUN, "--", *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
        env=env,
    )
    return ran.returncode, ran.stderr


def test_what_ends_of_a_reader_that_has_gone_is_not_diagnosed(env):
    reader, writer = os.pipe()
    os.close(reader)
    assert ended(["yes"], env, writer) == (141, b"")
    os.close(writer)


@pytest.mark.parametrize("by", ["bare", "run"])
def test_first_write_fails_if_the_reader_left_before_the_start(by, tmp_path):
    code = "import sys\nprint('x', flush=True)\nopen('done', 'w')"
    reader, writer = os.pipe()
    os.close(reader)
    command = [*([] if by == "bare" else QUIET), sys.executable, "-c", code]
    ran = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=LIMIT_S, check=False
    )
    os.close(writer)

    assert (ran.returncode, b"BrokenPipeError" in ran.stderr) == (1, True)
    assert not (tmp_path / "done").exists()
