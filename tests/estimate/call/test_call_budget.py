"""A call of ``generate``: the closed form is near the trace, and says where it does not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB
from oomguard.estimate.call.call_budget import PlannedCall, budget_call
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.parameters import count_parameters
from oomguard.estimate.model.shape import read_shape

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
}
CALL = PlannedCall(LLAMA, batch_size=4, prompt_tokens=512, max_new_tokens=64)


def model_of(config: dict = LLAMA):
    return read_model(
        ModelFiles("model", "config.json", config, count_parameters(read_shape(config)))
    )


def test_the_closed_form_is_near_the_trace():
    pytest.importorskip("transformers")
    closed, traced = (
        budget_call(model_of(), CALL, GIB),
        budget_call(model_of(), CALL, GIB, trace=True),
    )

    assert (closed.traced, traced.traced) == (False, True)
    over = closed.peak_bytes - closed.weights_bytes
    assert over == pytest.approx(traced.peak_bytes - traced.weights_bytes, rel=0.01)


def test_the_largest_batch_fits_and_one_row_more_does_not():
    found = budget_call(model_of(), CALL, 2 * GIB)
    rows = found.largest_batch_size

    assert rows > 4
    assert budget_call(model_of(), replace(CALL, batch_size=rows), 2 * GIB).fits
    assert not budget_call(model_of(), replace(CALL, batch_size=rows + 1), 2 * GIB).fits


def test_a_model_that_does_not_fit_has_no_batch():
    found = budget_call(model_of(), CALL, GIB // 4)
    assert (found.fits, found.largest_batch_size) == (False, 0)


def test_the_cache_grows_with_beams_and_tokens():
    assert (
        budget_call(model_of(), replace(CALL, num_beams=2), GIB).kv_cache_bytes
        == 2 * budget_call(model_of(), CALL, GIB).kv_cache_bytes
    )


def test_more_tokens_than_positions_are_said():
    found = budget_call(model_of(), replace(CALL, prompt_tokens=5000), 8 * GIB)
    assert any(
        "5064 tokens exceed the model's 4096 positions" in line for line in found.assumptions
    )


def test_where_the_closed_form_does_not_hold_the_trace_is_named(subtests):
    for name, config, call, message in [
        ("falcon", {**LLAMA, "model_type": "falcon"}, CALL, "does not cover falcon"),
        ("static", LLAMA, replace(CALL, cache_implementation="static"), "dynamic cache"),
        (
            "flash",
            LLAMA,
            replace(CALL, attn_implementation="flash_attention_2"),
            "attn_implementation 'flash_attention_2' is not supported",
        ),
    ]:
        with subtests.test(name):
            with pytest.raises(SettingError, match=message) as caught:
                budget_call(model_of(config), call, GIB)
            assert "--trace" in str(caught.value.hint)


def test_a_gpu_of_no_bytes_is_refused():
    with pytest.raises(SettingError, match="0 bytes"):
        budget_call(model_of(), CALL, 0)
