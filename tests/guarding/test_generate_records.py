"""``generate`` with ``return_dict_in_generate`` in parts: every field of the record, step by step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, made, padded, whole_and_in_parts  # noqa: E402

STEPS = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def test_every_field_of_a_record_is_that_of_the_whole_call(subtests, llama):
    def check(fields):
        asked = dict.fromkeys(fields, True)
        share = 0.8  # the record itself is a good part of it
        whole, parts, _ = whole_and_in_parts(lambda: llama.generate(**padded(), **STEPS, **asked), share)

        assert_same(whole, parts)
        assert type(parts.past_key_values) is type(whole.past_key_values)

    for name, fields in [
        ("scores", ("output_scores", "output_logits")),
        ("states", ("output_hidden_states", "output_attentions")),
    ]:
        with subtests.test(name):
            check(fields)


def test_a_record_whose_parts_end_at_different_steps_is_not_put_together(llama):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ends = list(range(5, 30))  # so many that the rows of one part have all ended before those of another
        options = {**STEPS, "max_new_tokens": 24, "eos_token_id": ends, "output_scores": True}
        whole_and_in_parts(lambda: llama.generate(**padded(), **options))

    assert "differ in more than their rows" in "".join(raised.value.__notes__)


SEVERAL = {
    "best beams": {"num_beams": 3, "num_return_sequences": 2},
    "drawn sequences": {"do_sample": True, "num_return_sequences": 3},
}


def test_a_record_of_several_rows_an_input_is_that_of_the_whole_call(subtests, llama):
    def check(options):
        asked = {**STEPS, "output_scores": True, "output_hidden_states": True, **options}

        def call():
            torch.manual_seed(3)
            found = llama.generate(**padded(), **asked)
            steps = (found.sequences, found.scores, found.get("beam_indices"))
            return found, llama.compute_transition_scores(*steps, normalize_logits="num_beams" not in options)

        whole, parts, g = whole_and_in_parts(call, 0.8)

        assert_same(whole, parts)
        assert any(attempt.patches for attempt in g.attempts)

    for name, options in SEVERAL.items():
        with subtests.test(name):
            check(options)
