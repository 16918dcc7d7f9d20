"""One row whose cache is too large: its layers wait on the host, which changes no token, or it is quantized where that is permitted."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

TOKENS, NEW, LAYERS = 64, 12, 8
FAMILIES = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 32},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "GPT2LMHeadModel": {"n_layer": LAYERS, "n_embd": 32, "n_head": 4, "n_positions": 512},
}
NOT_COMPARED = "StableLmForCausalLM"


def model_of(name="LlamaForCausalLM"):
    ends = {"bos_token_id": 1, "eos_token_id": None}
    model = made(
        name, attention="sdpa", num_hidden_layers=LAYERS, num_key_value_heads=4, **ends, **FAMILIES.get(name, {})
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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_on_the_host_gives_the_same_tokens(name):
    model = model_of(name)
    with oomguard.guard(pin=["prefill_chunk_size"]) as g:
        whole, capacity = beyond_weights(model, 0.7, num_beams=2)
        with limit_memory(capacity):
            kept = call(model, num_beams=2)

    assert_same(whole, kept)
    assert changes(g) == {"cache_implementation": "offloaded"}
    assert g.attempts[-1].patches[0].effect.name == "OUTPUT_PRESERVING"


def test_the_bytes_at_the_peak_are_those_that_were_traced(llama):
    _, capacity = beyond_weights(llama, 0.7, num_beams=2)
    with limit_memory(capacity) as device, oomguard.guard(pin=["prefill_chunk_size"]) as g:
        call(llama, num_beams=2)
        peak = device.peak_bytes

    reason = g.attempts[-1].patches[0].reason
    assert "traced" in reason
    assert peak <= capacity


def test_a_static_cache_waits_on_the_host_too(llama):
    options = {"cache_implementation": "static", "num_beams": 2}
    whole, capacity = beyond_weights(llama, 0.75, **options)
    with limit_memory(capacity), oomguard.guard(pin=["prefill_chunk_size"]) as g:
        kept = call(llama, **options)

    assert_same(whole, kept)
    assert changes(g) == {"cache_implementation": "offloaded_static"}


def test_where_neither_is_enough_the_cache_is_on_the_host_and_the_prompt_in_chunks(llama):
    options = {"tokens": 256, "max_new_tokens": 3}
    whole, capacity = beyond_weights(llama, 0.3, **options)
    with limit_memory(capacity), oomguard.guard() as g:
        both = call(llama, **options)

    assert_same(whole, both)
    assert set(changes(g)) == {"cache_implementation", "prefill_chunk_size"}
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]


def test_a_later_call_as_long_begins_so(llama):
    with limit_memory("4 GiB"):
        whole = call(llama, num_beams=2)
    _, capacity = beyond_weights(llama, 0.7, num_beams=2)
    with limit_memory(capacity), oomguard.guard(pin=["prefill_chunk_size"]) as g:
        assert_same([whole, whole], [call(llama, num_beams=2), call(llama, num_beams=2)])

    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", "", ""]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache is off: there is no cache"),
        ({"return_dict_in_generate": True}, "the result holds the cache"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens takes tokens back"),
    ],
)
def test_a_call_whose_cache_cannot_be_kept_elsewhere_says_why(llama, options, reason):
    _, capacity = beyond_weights(llama, 0.5, **options)
    with (
        limit_memory(capacity),
        oomguard.guard(pin=["prefill_chunk_size", "batch_size"]),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call(llama, **options)

    assert reason in "\n".join(raised.value.__notes__)


def test_a_quantized_cache_needs_permission():
    model, options = model_of(NOT_COMPARED), {"tokens": 256, "max_new_tokens": 3}
    with limit_memory("4 GiB") as device:
        call(model, cache_implementation="quantized", cache_config={"backend": "fp8"}, **options)
        capacity = int(device.peak_bytes * 1.1)
    with limit_memory(capacity), oomguard.guard() as g, pytest.raises(torch.OutOfMemoryError) as raised:
        call(model, **options)
    (line,) = [line for line in "\n".join(raised.value.__notes__).splitlines() if "change: cache_implem" in line]
    assert "--allow changes-outputs permits it" in line
    assert not changes(g)

    with limit_memory(capacity), oomguard.guard(allow="changes-outputs", pin=["max_new_tokens"]) as g:
        quantized = call(model, **options)
    assert changes(g) == {"cache_implementation": "quantized"}
    assert quantized.shape == (1, 259)


@pytest.mark.skipif(find_spec("optimum") is not None, reason="a library that quantizes is installed")
def test_without_a_library_that_quantizes_the_reason_says_which_to_install(llama, monkeypatch):
    from oomguard.engines.transformers import cache_kept

    monkeypatch.setattr(cache_kept, "_BACKENDS", ("quanto",))  # as in a transformers without fp8
    backend, why = cache_kept._backend(llama)

    assert backend is None
    assert "pip install optimum-quanto" in why


def test_a_cache_on_the_host_of_an_older_transformers_is_not_taken_on_a_gpu(llama, monkeypatch):
    from packaging.version import Version

    from oomguard.engines.transformers import cache_kept
    from oomguard.engines.transformers.generate import GenerateCall

    monkeypatch.setattr(type(llama), "device", torch.device("cuda"))  # that it is on one is all that is asked
    ids = torch.ones((1, 8), dtype=torch.long)
    generated = GenerateCall.of(llama, (), {"input_ids": ids, "max_new_tokens": 4})

    assert not isinstance(cache_kept.keeping_cache(generated, "offloaded"), str)
    monkeypatch.setattr(cache_kept, "_transformers", lambda: Version("5.17"))
    why_not = "before transformers 5.20 its cache on the host may give other tokens"
    assert cache_kept.keeping_cache(generated, "offloaded") == why_not
