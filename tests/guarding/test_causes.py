"""What the guard knows of a call comes before what the names of its frames suggest."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 256)

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        return torch.nn.functional.scaled_dot_product_attention(hidden, hidden, hidden).exp()


def cause(function, *args, **kwargs):
    """Return the first cause of the failure that a guarded function ends with."""
    guarded = oomguard.guard(function)
    with limit_memory("16 MiB"), pytest.raises(torch.OutOfMemoryError):
        guarded(*args, **kwargs)
    return guarded.diagnosis.first_cause.causes[0]


def test_a_batch_that_fails_in_attention_is_no_long_prompt():
    model = Model().eval()

    @torch.no_grad()
    def embed(ids):
        return model(ids)

    found = cause(embed, torch.zeros(512, 32, dtype=torch.long))
    assert found.id == "batch_too_large"
    assert "512 rows of 32" in found.explanation


def test_one_row_that_is_too_long_is_told_as_that():
    model = Model().eval()

    @torch.no_grad()
    def embed(ids):
        return model(ids)

    assert (
        cause(embed, torch.zeros(1, 16384, dtype=torch.long)).id
        == "max_new_tokens_or_context_too_long"
    )


def test_training_file_frames_do_not_mean_training(tmp_path):
    source = tmp_path / "train.py"
    source.write_text("import torch\ndef work(rows):\n    return torch.empty(len(rows), 2**30)\n")
    module = ModuleType("train")
    exec(compile(source.read_text(), str(source), "exec"), module.__dict__)

    guarded = oomguard.guard(batch="rows")(module.work)
    with limit_memory("16 MiB"), pytest.raises(torch.OutOfMemoryError):
        guarded([1, 2, 3])
    assert "train" not in sys.modules
    assert guarded.diagnosis.first_cause.causes[0].id == "batch_too_large"


def test_a_guard_inside_a_loop_of_attempts_leaves_one_diagnosis():
    @oomguard.guard(batch="rows")
    def work(rows):
        return list(torch.zeros(len(rows), 2**18).exp())

    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        for attempt in oomguard.attempts(batch_size=8):
            with attempt:
                work(list(range(attempt.settings["batch_size"])))
    diagnoses = [note for note in caught.value.__notes__ if "why:" in note]
    assert len(diagnoses) == 1


def test_a_script_keeps_its_names_after_a_failure_in_it():
    names = {
        "torch": torch,
        "oomguard": oomguard,
        "Model": Model,
        "limit_memory": limit_memory,
        "__name__": "script",
    }
    script = """
try:
    with limit_memory("1 MiB"), oomguard.guard():
        model = Model()
        model(torch.zeros(8, 512, dtype=torch.long))
except torch.OutOfMemoryError as error:
    notes = error.__notes__
"""
    exec(script, names)
    assert {"model", "torch", "oomguard"} < names.keys()
    assert "why:" in names["notes"][0]
