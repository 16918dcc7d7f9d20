"""One row whose cache is too large: its layers wait on the host, which changes no token, or it is quantized where that is permitted."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

TOKENS, NEW, LAYERS = 64, 4, 4
FAMILIES = {
    "MistralForCausalLM": {"sliding_window": 32},
}
NOT_COMPARED = "StableLmForCausalLM"


def model_of(name="LlamaForCausalLM"):
    ends = {"bos_token_id": 1, "eos_token_id": None}
    model = made(
        name,
        attention="sdpa",
        num_hidden_layers=LAYERS,
        num_key_value_heads=4,
        **ends,
        **FAMILIES.get(name, {}),
    )
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def llama():
    return model_of()


def call(model, rows=1, tokens=TOKENS, **options):
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    torch.manual_seed(5)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def beyond_weights(model, share, **options):
    """A device with room for the weights and a share of what the call takes beside them."""
    weights = sum(tensor.nbytes for tensor in model.parameters())
    with limit_memory("4 GiB") as device:
        whole = call(model, **options)
        return whole, int(weights + share * (device.peak_bytes - weights))


def changes(g):
    return {patch.setting: patch.new for attempt in g.attempts for patch in attempt.patches}


def test_the_cache_on_the_host_gives_the_same_tokens():
    model = model_of("MistralForCausalLM")
    whole, capacity = beyond_weights(model, 0.7, num_beams=2)
    with limit_memory(capacity), oomguard.guard(pin=["prefill_chunk_size"]) as g:
        kept = call(model, num_beams=2)

    assert_same(whole, kept)
    assert changes(g) == {"cache_implementation": "offloaded"}
    assert g.attempts[-1].patches[0].effect.name == "OUTPUT_PRESERVING"


def test_a_call_whose_cache_cannot_be_kept_elsewhere_says_why(llama):
    _, capacity = beyond_weights(llama, 0.5, return_dict_in_generate=True)
    with (
        limit_memory(capacity),
        oomguard.guard(pin=["prefill_chunk_size", "batch_size"]),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call(llama, return_dict_in_generate=True)

    assert "the result contains the cache" in "\n".join(raised.value.__notes__)


def test_a_quantized_cache_needs_permission():
    model, options = model_of(NOT_COMPARED), {"tokens": 256, "max_new_tokens": 3}
    with limit_memory("4 GiB") as device:
        call(model, cache_implementation="quantized", cache_config={"backend": "fp8"}, **options)
        capacity = int(device.peak_bytes * 1.1)
    with (
        limit_memory(capacity),
        oomguard.guard() as g,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call(model, **options)
    (line,) = [
        line
        for line in "\n".join(raised.value.__notes__).splitlines()
        if "cache_implementation=" in line and "not automatic" in line
    ]
    assert "--allow changes-outputs permits it" in line
    assert not changes(g)

    with (
        limit_memory(capacity),
        oomguard.guard(allow="changes-outputs", pin=["max_new_tokens"]) as g,
    ):
        quantized = call(model, **options)
    assert changes(g) == {"cache_implementation": "quantized"}
    assert quantized.shape == (1, 259)


def test_host_cache_of_old_transformers_is_not_used_on_a_gpu(llama, monkeypatch):
    from packaging.version import Version

    from oomguard.engines.transformers import generate_variants
    from oomguard.engines.transformers.generate import GenerateCall

    monkeypatch.setattr(
        type(llama), "device", torch.device("cuda")
    )  # that it is on one is all that is asked
    ids = torch.ones((1, 8), dtype=torch.long)
    generated = GenerateCall.of(llama, (), {"input_ids": ids, "max_new_tokens": 4})

    assert not isinstance(generate_variants.with_cache_placement(generated, "offloaded"), str)
    monkeypatch.setattr(generate_variants, "_transformers", lambda: Version("5.17"))
    why_not = "transformers before 5.20 may give other tokens with a cache on the host"
    assert generate_variants.with_cache_placement(generated, "offloaded") == why_not
