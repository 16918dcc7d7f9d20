"""``generate`` with ``return_dict_in_generate`` in parts: every field of the record, step by step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, made, padded, whole_and_in_parts  # noqa: E402

STEPS = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", num_hidden_layers=2, bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def test_every_field_of_a_record_is_that_of_the_whole_call(llama):
    asked = dict.fromkeys(("output_scores", "output_hidden_states"), True)
    share = 0.8  # the record itself is a good part of it
    whole, parts, _ = whole_and_in_parts(
        lambda: llama.generate(**padded(), **STEPS, **asked), share
    )

    assert_same(whole, parts)
    assert type(parts.past_key_values) is type(whole.past_key_values)
