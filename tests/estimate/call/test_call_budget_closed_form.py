from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomguard.core.errors import SettingError
from oomguard.estimate.call.call_budget import generate_row_bytes
from oomguard.estimate.model.shape import read_shape

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LLAMA_8B = read_shape(CONFIG)
GIB = 2**30


def shape(**changes):
    return read_shape({**CONFIG, **changes})


def test_an_8b_prefill_is_what_a_fake_tensor_run_gives():
    """0.955 GiB over the weights at 4096 tokens (memory-model.md)."""
    assert generate_row_bytes(LLAMA_8B, 4096, 1) == pytest.approx(0.955 * GIB, rel=0.005)


def test_eager_attention_grows_with_the_square_of_the_length():
    """Measured for an 8B in bf16: 5.72 GiB more at 4096 tokens; the MLP's peak does not come at the same time."""
    sdpa, eager = (generate_row_bytes(LLAMA_8B, 4096, 1, eager=eager) for eager in (False, True))
    assert eager - sdpa == pytest.approx(5.72 * GIB, rel=0.25)
    assert generate_row_bytes(LLAMA_8B, 8192, 1, eager=True) > 3.5 * eager


def test_a_long_answer_is_counted_by_its_cache():
    short, long = generate_row_bytes(LLAMA_8B, 16, 16), generate_row_bytes(LLAMA_8B, 16, 8192)
    assert long - short >= 8176 * 131072


def test_twice_the_element_size_is_twice_the_bytes():
    one, two = (
        generate_row_bytes(replace(shape(vocab_size=8), dtype_bytes=n), 1024, 1) for n in (2, 4)
    )
    assert two == pytest.approx(2 * one, rel=0.001)


def test_padding_adds_a_mask():
    """The heads that a mask repeats are gone before the MLP, where the peak is."""
    plain, padded = (
        generate_row_bytes(LLAMA_8B, 4096, 1, padded=padded) for padded in (False, True)
    )
    assert padded - plain == 4096 * 4096


def test_a_window_keeps_the_whole_prompt_until_the_first_answer():
    """The cache of a window is a view of all keys until torch.cat makes it anew."""
    window = shape(model_type="mistral", sliding_window=512)

    assert generate_row_bytes(window, 4096, 1) == generate_row_bytes(LLAMA_8B, 4096, 1)
    assert generate_row_bytes(window, 16, 8192) < generate_row_bytes(LLAMA_8B, 16, 8192) / 2


def test_each_beam_scores_the_whole_vocabulary_once_more():
    greedy, beams = (generate_row_bytes(LLAMA_8B, 16, 16, beams=beams) for beams in (False, True))
    assert beams - greedy == 4 * CONFIG["vocab_size"]


def test_experts_copy_their_tokens():
    dense, sparse = (
        shape(model_type="mixtral", intermediate_size=512),
        shape(
            model_type="mixtral",
            intermediate_size=512,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    )
    copies = 2 * 4096 * 2 * (2 + 4)  # two experts: states and results, and both in float32
    norm = 2 * 4 * 4096
    both = [generate_row_bytes(model, 4096, 1) for model in (sparse, dense)]
    assert both[0] - both[1] == 4096 * (copies - norm)


def test_what_caches_no_keys_and_values_is_refused(subtests):
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for name, changes, message in [
        ("a latent vector", latent, "cache keys and values"),
        ("falcon", {"model_type": "falcon"}, "does not cover falcon"),
    ]:
        with subtests.test(name), pytest.raises(SettingError, match=message):
            generate_row_bytes(shape(**changes), 1024, 1)


@settings(deadline=None)
@given(
    st.integers(1, 80),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(8, 256),
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.integers(1, 1000),
)
def test_a_row_needs_more_the_longer_it_is(layers, kv_heads, head_dim, prompt, new, more):
    model = shape(num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    row = generate_row_bytes(model, prompt, new)

    assert row >= (prompt + new) * 2 * layers * kv_heads * head_dim * 2
    assert generate_row_bytes(model, prompt + more, new) > row
    assert generate_row_bytes(model, prompt, new + more) >= row
    assert generate_row_bytes(model, prompt, new, padded=True) >= row
