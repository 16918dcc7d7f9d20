"""The allocator's options reach a program through its variables, beside the user's own, and never against them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.supervising import LIMIT_S, RUN

FAILS = """
import os, sys
if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
    print("RAN", os.environ["PYTORCH_ALLOC_CONF"], os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    sys.exit()
class OutOfMemoryError(RuntimeError): pass
OutOfMemoryError.__module__ = "torch"
raise OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.00 GiB is free. Including "
    "non-PyTorch memory, this process has 22.69 GiB memory in use. Of the allocated memory 12.00 GiB is allocated by PyTorch, and "
    "9.00 GiB is reserved by PyTorch but unallocated."
)
"""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTORCH_", "OOMGUARD_"))
    }
    return subprocess.run(
        [*RUN, *words],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.py").write_text(FAILS)
    return str(tmp_path / "job.py")


@pytest.mark.parametrize(
    ("variables", "ran"),
    [
        ({}, "RAN expandable_segments:True expandable_segments:True\n"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            "RAN max_split_size_mb:64,expandable_segments:True max_split_size_mb:64,expandable_segments:True\n",
        ),
    ],
)
def test_expandable_segments_join_the_allocator_options(job, variables, ran):
    done = run("--", sys.executable, job, **variables)
    assert (done.returncode, done.stdout) == (0, ran)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
        (["env", "PYTORCH_ALLOC_CONF=backend:native"], {}),
    ],
)
def test_what_the_user_decided_stays(job, words, variables):
    done = run("--", *words, sys.executable, job, **variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Running the command again" not in done.stderr


def test_the_command_to_paste_has_the_variable(job):
    done = run("--dry-run", "--", sys.executable, job)
    assert f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {sys.executable} {job}" in done.stderr
