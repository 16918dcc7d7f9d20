"""The traced peak of ``generate`` is what the real CPU allocator gives out; benchmarks/generate_peak.py has more cases."""

from __future__ import annotations

import pytest

from oomguard.core.errors import InputError, SettingError
from oomguard.estimate.call.call_budget import PlannedCall, traced_steps

pytest.importorskip("transformers")

from generate_peak import exact_dtype, real_peak

TINY = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def test_the_traced_peak_is_the_allocator_s():
    call = PlannedCall(
        TINY, 2, prompt_tokens=64, max_new_tokens=3, num_beams=3, dtype=exact_dtype()
    )

    assert traced_steps(call).peak_bytes(call.max_new_tokens) == pytest.approx(
        real_peak(call), rel=0.01
    )


def test_a_longer_answer_adds_one_token_a_step():
    def last(tokens: int) -> int:
        call = PlannedCall(TINY, batch_size=4, prompt_tokens=8, max_new_tokens=tokens)
        return traced_steps(call).last_step_bytes(tokens)

    eight, sixteen = last(8), last(16)
    kv = 8 * 4 * 2 * 2 * 2 * 32 * 2
    assert kv <= sixteen - eight <= 2 * kv  # the cache, and one layer's copy of it


def test_a_model_that_transformers_does_not_know_is_one_message():
    with pytest.raises(InputError, match="trace of the model failed"):
        traced_steps(PlannedCall({**TINY, "model_type": "nobody_knows_this"}, 1, 8, 2))


def test_numbers_that_are_no_counts_are_refused(subtests):
    for name in ["batch_size", "prompt_tokens", "max_new_tokens", "num_beams"]:
        with subtests.test(name=name):
            numbers = {
                "batch_size": 1,
                "prompt_tokens": 8,
                "max_new_tokens": 2,
                "num_beams": 1,
                name: 0,
            }
            with pytest.raises(SettingError, match=f"{name} is 0"):
                traced_steps(PlannedCall(TINY, **numbers))
