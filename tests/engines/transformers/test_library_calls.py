"""Methods of other libraries around ``generate``, read as the call that they amount to."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.library_calls import AdaptersCall, HarnessCall  # noqa: E402

IDS = torch.arange(3, 27).reshape(4, 6)


class Harness:
    """In the shape of lm-evaluation-harness' model of transformers."""

    tokenizer = SimpleNamespace(pad_token_id=2)

    def __init__(self):
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        self.model = transformers.LlamaForCausalLM(config).eval()

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        raise AssertionError("only read")


def test_part_of_a_harness_call_has_its_rows_and_all_stop_words():
    given = {
        "context": IDS,
        "attention_mask": torch.ones_like(IDS),
        "stop": ["a", "b"],
        "max_length": 9,
    }
    call = HarnessCall.of(Harness(), (), {**given, "do_sample": False})

    args, kwargs = call.part(1, 3)
    assert call.not_splittable is None
    assert (call.rows, call.prompt_tokens, call.max_new_tokens, call.pad_value) == (4, 6, 3, 2)
    assert args == ()
    assert torch.equal(kwargs["context"], IDS[1:3])
    assert kwargs["attention_mask"].shape == (2, 6)
    assert kwargs["stop"] == ["a", "b"]


def test_adapters_follow_their_rows():
    model = Harness().model
    plain = AdaptersCall.of(model, (), {"input_ids": IDS})
    mixed = AdaptersCall.of(model, (), {"input_ids": IDS, "adapter_names": ["a", "b", "c", "d"]})

    assert "no adapter for each row" in plain.not_splittable
    assert mixed.not_splittable is None
    assert mixed.part(2, 4)[1]["adapter_names"] == ["c", "d"]


def test_hooks_of_a_failed_adapter_call_are_removed():
    model = Harness().model

    def _adapter_names_pre_forward_hook(target, args, kwargs, adapter_names):
        return args, kwargs

    def hang():
        kept = partial(_adapter_names_pre_forward_hook, adapter_names=["a"] * 4)
        model.lm_head.register_forward_pre_hook(kept, with_kwargs=True)

    own = model.lm_head.register_forward_pre_hook(lambda *_given: None)
    call = AdaptersCall.of(model, (), {"input_ids": IDS, "adapter_names": ["a", "b", "c", "d"]})
    hang()
    with pytest.raises(torch.OutOfMemoryError), call.around(0, 2):
        during = list(model.lm_head._forward_pre_hooks)
        hang()
        raise torch.OutOfMemoryError

    assert during == list(model.lm_head._forward_pre_hooks) == [own.id]
