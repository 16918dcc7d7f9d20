"""The guard on one generated case; `python benchmarks/batch_cases.py` runs 240 beside its peers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import batch_cases
from support.batch_tools import with_oomguard

SEED = 7  # another than the benchmark's own
SMALL = {"hidden": 64, "layers": 2, "vocab": 500, "prompt": 48, "new": 3}


def test_one_failed_attempt_and_nearly_all_rows_that_fit():
    trial = batch_cases.Trial(batch_cases.make_case(2, SEED) | SMALL)
    feasible = trial.feasible()
    failed, rows = with_oomguard(trial)
    assert feasible < trial.case["rows"]
    assert failed == 1
    assert min(feasible - 1, 0.97 * feasible) <= rows <= feasible
