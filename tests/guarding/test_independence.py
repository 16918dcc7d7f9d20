"""Rows are run apart if a table says that they are independent; code of the user's own is refused with the line to write."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import made, padded  # noqa: E402
from transformers import LogitsProcessorList, StoppingCriteriaList  # noqa: E402

from oomguard.engines.transformers import independence  # noqa: E402
from oomguard.engines.transformers.independence import why_rows_depend  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

OTHER_WAYS = ["attn_implementation", "prefill_chunk_size", "cache_implementation"]
GREEDY = {"do_sample": False, "max_new_tokens": 4}
LINE = '@oomguard.guard(batch=("input_ids", "attention_mask"))'
GIVEN = {"input_ids": torch.ones(4, 5), "attention_mask": torch.ones(4, 5), "use_cache": False}


@pytest.fixture
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def notes_of(call):
    """Return the notes of a call that does not fit and is not run in parts."""
    with limit_memory("4 GiB") as device:
        call()
    with (
        limit_memory(device.peak_bytes // 2),
        pytest.raises(torch.OutOfMemoryError) as raised,
        oomguard.guard(pin=OTHER_WAYS) as guard,
    ):
        call()
    assert [attempt.succeeded for attempt in guard.attempts] == [False]
    assert not hasattr(raised.value, "partial")
    return "".join(raised.value.__notes__)


class Own(transformers.LlamaForCausalLM):
    """A model of the user's own."""


def test_call_of_an_own_model_raises_with_the_line_to_write(llama):
    model = Own(llama.config).eval()
    model.generation_config.pad_token_id = 0
    notes = notes_of(lambda: model.generate(**padded(), **GREEDY))
    assert "Own is your own code" in notes
    assert LINE in notes


def test_with_that_line_it_is_run_in_parts(llama):
    model = Own(llama.config).eval()
    model.generation_config.pad_token_id = 0
    batch = padded()

    @oomguard.guard(batch=("input_ids", "attention_mask"))
    def answer(input_ids, attention_mask):
        return model.generate(input_ids=input_ids, attention_mask=attention_mask, **GREEDY)

    with limit_memory("4 GiB") as device:
        whole = answer(**batch)
    with limit_memory(device.peak_bytes // 2):
        assert torch.equal(answer(**batch), whole)
    assert [attempt.succeeded for attempt in answer.attempts] == [False, True]


def test_user_functions_in_generate_keep_the_call_whole(subtests, llama):
    for name, own in (
        ("logits_processor", LogitsProcessorList([lambda ids, scores: scores - scores.mean(0)])),
        (
            "stopping_criteria",
            StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]),
        ),
    ):
        with subtests.test(name):
            notes = notes_of(
                lambda own=own, name=name: llama.generate(**padded(), **GREEDY, **{name: own})
            )
            assert f"the argument {name}: <lambda> may look at other rows" in notes
            assert LINE in notes


def test_each_kind_of_own_code_is_found(subtests, llama, monkeypatch):
    assert why_rows_depend(llama, "forward", GIVEN, 4) is None

    def layer():
        llama.model.layers[0].mlp.act_fn = torch.nn.Module()
        llama.model.layers[0].mlp.act_fn.__class__ = type("Mine", (torch.nn.Module,), {})
        return "Mine"

    def function():
        llama.model.forward = lambda *args: None
        return "model.forward"

    def method():
        monkeypatch.setattr(type(llama.model.norm), "forward", lambda self, states: states)
        return "LlamaRMSNorm.forward"

    for change in (layer, function, method):
        with subtests.test(change.__name__):
            own = change()
            assert why_rows_depend(llama, "forward", GIVEN, 4).startswith(f"{own} is your own code")
            monkeypatch.undo()
            vars(llama.model).pop("forward", None)
            llama.model.layers[0].mlp.act_fn = torch.nn.SiLU()


def test_rows_sharing_expert_capacity_are_refused_by_the_table():
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_experts": 2,
        "vocab_size": 64,
    }
    model = transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(
            **sizes, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
        )
    )
    assert "experts share a fixed token capacity across the batch" in why_rows_depend(
        model.eval(), "generate", GIVEN, 4
    )


def test_a_class_that_the_table_does_not_know_is_refused(llama, monkeypatch):
    monkeypatch.setitem(
        independence._table(),
        "forward",
        {"independent": frozenset(), "dependent": {}, "by_version": {}},
    )
    why = why_rows_depend(llama, "forward", GIVEN, 4)
    assert why.startswith(
        "oomguard does not know whether the rows of LlamaForCausalLM depend on each other"
    )
    assert LINE in why
