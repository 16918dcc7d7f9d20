"""Methods of other libraries around ``generate``, read as the call that they amount to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.libraries import AdaptersCall, HarnessCall  # noqa: E402

IDS = torch.arange(3, 27).reshape(4, 6)


class Harness:
    """In the shape of lm-evaluation-harness' model of transformers."""

    tokenizer = SimpleNamespace(pad_token_id=2)

    def __init__(self):
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = transformers.LlamaForCausalLM(config).eval()

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        raise AssertionError("only read")


def test_a_part_of_the_harness_call_has_its_rows_and_all_stop_words():
    given = {"context": IDS, "attention_mask": torch.ones_like(IDS), "stop": ["a", "b"], "max_length": 9}
    call = HarnessCall.of(Harness(), (), {**given, "do_sample": False})

    args, kwargs = call.part(1, 3)
    assert call.not_splittable is None
    assert (call.rows, call.prompt_tokens, call.max_new_tokens, call.pad_value) == (4, 6, 3, 2)
    assert args == ()
    assert torch.equal(kwargs["context"], IDS[1:3])
    assert kwargs["attention_mask"].shape == (2, 6)
    assert kwargs["stop"] == ["a", "b"]


def test_the_harness_call_is_traced_as_the_generation_that_it_is():
    call = HarnessCall.of(Harness(), (IDS,), {"max_length": 9, "stop": ["a"], "attention_mask": torch.ones_like(IDS)})
    trace = call.traced()

    assert trace is not None
    assert trace.need_bytes(4) > trace.need_bytes(1) > 0


def test_adapters_go_with_their_rows_and_a_call_without_them_is_left_to_the_one_it_makes():
    model = Harness().model
    plain = AdaptersCall.of(model, (), {"input_ids": IDS})
    mixed = AdaptersCall.of(model, (), {"input_ids": IDS, "adapter_names": ["a", "b", "c", "d"]})

    assert "no adapters" in plain.not_splittable
    assert mixed.not_splittable is None
    assert mixed.part(2, 4)[1]["adapter_names"] == ["c", "d"]
