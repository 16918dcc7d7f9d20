"""What is loaded while a program of the user's runs draws none of its random numbers."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys

import pytest

from oomguard.mapping.map import keep_random_state

GUARDED = """
import random, sys
import torch
import oomguard
from oomguard.testing import limit_memory

@oomguard.guard(batch="papers")
def extract(papers):
    return torch.zeros(len(papers), 1024).sum(1)

random.seed(5)
before = random.getstate()
with limit_memory("100 KiB"):
    assert len(extract(list(range(64)))) == 64
assert extract.attempts
assert random.getstate() == before
"""


def test_library_that_draws_while_loading_keeps_random_state(tmp_path, monkeypatch):
    (tmp_path / "drawing_library.py").write_text("import random\nrandom.random()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "drawing_library", raising=False)
    random.seed(5)
    wanted = random.Random(5).random()

    with keep_random_state("drawing_library"):
        importlib.import_module("drawing_library")

    assert random.random() == wanted


def test_where_it_is_loaded_already_nothing_is_put_back():
    random.seed(5)
    drawn = random.Random(5)
    drawn.random()

    with keep_random_state("sys"):
        random.random()

    assert random.random() == drawn.random()


def test_a_call_that_is_split_in_a_fresh_process_draws_nothing():
    pytest.importorskip("torch", reason="torch is not installed")
    ran = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
