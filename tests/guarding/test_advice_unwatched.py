"""A failure in a model's method that no guard watches says so, and what to write."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
from oomguard.testing import limit_memory  # noqa: E402


class Codec(torch.nn.Module):
    """Its ``encode`` takes as much as it is given, sixteen times."""

    def encode(self, values, mask, scale=1.0):
        return [values * mask * scale for _ in range(16)]

    def compare(self, values, steps):
        return [values + step.sum() for _ in range(8) for step in steps]

    def forward(self, values):
        return [values + 1 for _ in range(16)]


def note_of(call):
    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as raised, oomguard.guard():
        call(torch.ones(64, 1024), Codec())
    return raised.value.__notes__[-1]


def test_own_method_is_named_with_its_row_arguments():
    note = note_of(lambda values, codec: codec.encode(values, values))
    assert "Codec.encode is not watched" in note
    assert '@oomguard.guard(batch=("values", "mask")) above def f(values, mask)' in note


def test_argument_without_row_entries_has_no_line_to_paste():
    note = note_of(
        lambda values, codec: codec.compare(values, (torch.ones(3, 2), torch.ones(3, 2)))
    )
    assert (
        "steps does not have one entry per row. Put it, and the call that returned steps, into one"
        in note
    )
    assert 'batch="values"' not in note


def test_code_outside_any_call_is_named_with_the_line_to_write():
    def pool(values):
        return torch.cat([values] * 16)

    note = note_of(lambda values, codec: pool(values))
    assert "memory ran out in" in note
    assert "outside the calls that a guard watches" in note
    assert "@oomguard.guard(batch=NAME) above def" in note


def test_a_module_that_is_no_model_of_transformers_is_named():
    note = note_of(lambda values, codec: codec(values))
    assert "a call of Codec is not watched" in note


def test_decorated_function_is_named_with_its_own_arguments():
    @oomguard.guard()
    def encode(texts, width, labels):
        return Codec()(torch.ones(len(texts), width))

    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as raised:
        encode(["text"] * 64, 1024, labels=[1] * 64)
    assert (
        '@oomguard.guard(batch=("texts", "labels")) above def encode' in raised.value.__notes__[-1]
    )


def test_where_no_model_runs_nothing_is_said_of_one():
    with limit_memory("1 MiB"), pytest.raises(torch.OutOfMemoryError) as raised, oomguard.guard():
        [torch.ones(64, 1024) for _ in range(16)]
    assert "not watched" not in "".join(raised.value.__notes__)


def test_generate_taken_before_the_first_guard_is_named():
    program = """
import functools, torch, oomguard
from transformers import LlamaConfig, LlamaForCausalLM
from oomguard.testing import limit_memory

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=None)).eval()
ids = torch.ones(64, 64, dtype=torch.long)
answer = functools.partial(model.generate, max_new_tokens=2, do_sample=False)
with limit_memory("4 GiB") as device:
    answer(ids, attention_mask=torch.ones_like(ids))
    room = device.peak_bytes // 2
try:
    with limit_memory(room), oomguard.guard():
        answer(ids, attention_mask=torch.ones_like(ids))
except torch.OutOfMemoryError as error:
    print(error.__notes__[-1].splitlines()[0])
with limit_memory(room):
    print(tuple(oomguard.guard(answer)(ids, attention_mask=torch.ones_like(ids)).shape))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    note, shape = ran.stdout.splitlines()
    assert "from its model before its first guard" in note
    assert shape == "(64, 66)"
