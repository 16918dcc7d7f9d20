"""A cache and weights in fewer bits on a real GPU (`make test-gpu`), with permission: what they take, and that the call ends."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest

import oomguard
from oomguard.engines.transformers import generate_variants, weights

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from support.cuda_limit import limit_cuda  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # libraries that quantize tell of their kernels
]
MIB, TOKENS, NEW = 1 << 20, 6000, 4
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def model():
    """Of a family that is not compared with its cache on the host: what is left is to quantize it."""
    torch.manual_seed(0)
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, max_shard_size="100MB")
    return str(folder), sum(tensor.nbytes for tensor in model.parameters())


def answer(model, tokens=TOKENS, **options):
    ids = torch.randint(3, 4096, (1, tokens), generator=torch.Generator().manual_seed(1)).to("cuda")
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options
    ).cpu()


def peak_of(call):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    return result, torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def changes(g):
    return {patch.setting: patch.new for attempt in g.attempts for patch in attempt.patches}


@pytest.mark.parametrize("backend", ["fp8", "quanto"])
def test_a_cache_that_does_not_fit_is_quantized_with_permission(model, backend, told, monkeypatch):
    monkeypatch.setattr(generate_variants, "_BACKENDS", (backend,))
    found, why_not = generate_variants._backend(model)
    if found is None:
        pytest.skip(why_not)
    model.to("cuda")
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend}}
    answer(model)  # what is made once stays: workspaces, and what a library compiles
    answer(model, **options)
    held = torch.cuda.memory_allocated()
    whole, need, most = peak_of(lambda: answer(model))
    _, need_in_fewer_bits, most_in_fewer_bits = peak_of(lambda: answer(model, **options))
    told(
        f"beside the weights, cache as it is and by {backend}",
        f"{(most - held) // MIB} and {(most_in_fewer_bits - held) // MIB} MiB",
    )
    capacity = (need + need_in_fewer_bits) // 2
    pins = ["prefill_chunk_size", "max_new_tokens", "batch_size"]
    with limit_cuda(capacity), oomguard.guard(allow="changes-outputs", pin=pins) as g:
        quantized = answer(model)

    told(
        f"cache by {backend}",
        f"{[attempt.error for attempt in g.attempts]} {changes(g)}",
        "one failure, quantized",
    )
    assert need_in_fewer_bits < need
    assert quantized.shape == whole.shape
    assert changes(g) == {"cache_implementation": "quantized"}
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize(("bits", "share"), [(8, 0.85), (4, 0.6)])
def test_weights_are_quantized_by_quanto_with_permission(
    checkpoint, bits, share, told, monkeypatch
):
    if not weights._is_installed("optimum.quanto"):
        pytest.skip("optimum-quanto is not installed")
    rows = [row for row in weights._rows() if row["package"] == "optimum-quanto"]
    monkeypatch.setattr(weights, "_rows", lambda: rows)  # as where no other library is installed
    folder, size = checkpoint
    with (
        limit_cuda(torch.cuda.memory_allocated() + int(share * size)),
        oomguard.guard(allow="changes-outputs", pin=["weights_on_device_bytes", "dtype"]) as g,
    ):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=0)
        held = torch.cuda.memory_allocated()

    told(
        f"{size // MIB} MiB of weights on {share} of that",
        f"{held // MIB} MiB held, {[attempt.error for attempt in g.attempts]} {changes(g)}",
        f"{bits} bits",
    )
    assert changes(g) == {"quantization": f"optimum-quanto-{bits}bit"}
    assert answer(loaded, tokens=64).shape == (1, 64 + NEW)
