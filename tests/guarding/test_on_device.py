"""Guarded calls on a device that runs out of memory: the simulated one, and a real GPU with a limit (`make test-gpu`)."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made, ordinary  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402
from support.cuda_limit import limit_cuda  # noqa: E402

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# A caching allocator takes segments of megabytes: a real device needs tensors that are larger than they are.
SIZES = {
    "cpu": {"hidden_size": 32, "intermediate_size": 64, "tokens": 192, "rows": 12},
    "cuda": {"hidden_size": 1024, "intermediate_size": 4096, "tokens": 2048, "rows": 48},
}


class Place:
    """A device: what a call takes on it at its peak, and a limit below that."""

    def __init__(self, kind):
        self.kind, self.sizes = kind, SIZES[kind]

    def model(self, name, **options):
        widths = {key: self.sizes[key] for key in ("hidden_size", "intermediate_size")}
        model = made(name, **widths, max_position_embeddings=4096, **options)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return model.to(self.kind)

    def batch(self, rows=None):
        shape = (rows or self.sizes["rows"], self.sizes["tokens"])
        ids = torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids.to(self.kind), "attention_mask": torch.ones_like(ids).to(self.kind)}

    def peak_bytes(self, call):
        if self.kind == "cpu":
            with limit_memory("64 GiB") as device:
                return call(), device.peak_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return call(), torch.cuda.max_memory_allocated()

    def limit(self, capacity_bytes):
        return limit_memory(capacity_bytes) if self.kind == "cpu" else limit_cuda(capacity_bytes)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def place(request):
    return Place(request.param)


def generated(**options):
    def make(place):
        model = place.model("LlamaForCausalLM", attention=options.pop("attention", "sdpa"))
        rows = options.pop("rows", None)

        def call():
            torch.manual_seed(3)
            return model.generate(**place.batch(rows), max_new_tokens=6, **{"do_sample": False, **options})

        return call

    return make


def plain(name, **options):
    def make(place):
        model = place.model(name, **options)

        def call():
            with torch.inference_mode():
                return model(**place.batch())

        return call

    return make


CALLS = {
    "greedy": (generated, {}, "batch_size"),
    "beams": (generated, {"num_beams": 3}, "batch_size"),
    "sampling": (generated, {"do_sample": True, "top_k": 20}, "batch_size"),
    "one row with scores": (generated, {"attention": "eager", "rows": 1}, "attn_implementation"),
    "one long row": (generated, {"rows": 1}, "prefill_chunk_size"),
    "logits": (plain, {"name": "LlamaForCausalLM", "attention": "sdpa"}, "batch_size"),
    "classes": (plain, {"name": "BertForSequenceClassification", "num_labels": 3}, "batch_size"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_alone_runs_after_one_failure_with_the_same_result(place, name):
    make, options, setting = CALLS[name]
    call = make(**options)(place)
    whole, peak = place.peak_bytes(call)
    capacity = int(peak * (0.8 if setting == "prefill_chunk_size" else 0.6))
    with place.limit(capacity), pytest.raises(torch.OutOfMemoryError):
        call()
    with place.limit(capacity), oomguard.guard() as g:
        parts = call()

    assert_same(whole, ordinary(parts))
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]
    assert [patch.setting for patch in g.attempts[-1].patches] == [setting]
