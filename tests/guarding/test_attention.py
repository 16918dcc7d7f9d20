"""A call that does not fit for the scores of eager attention: run without them, with the same results."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made, whole_and_in_parts  # noqa: E402

from oomguard.engines.transformers.forward_variants import (  # noqa: E402
    _families,
    use_attention,
    why_not_use_attention,
)

GREEDY = {"do_sample": False, "max_new_tokens": 4}
SETTING = "attn_implementation"


@pytest.fixture
def llama():
    model = made(
        "LlamaForCausalLM", bos_token_id=1, eos_token_id=None, max_position_embeddings=1024
    )
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows=1, tokens=384, pads=0):
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def changed(g):
    return [(patch.setting, patch.new) for attempt in g.attempts for patch in attempt.patches]


def test_a_long_row_gives_the_same_tokens_without_its_scores(llama):
    whole, other, g = whole_and_in_parts(lambda: llama.generate(**prompt(pads=5), **GREEDY), 0.6)

    assert_same(whole, other)
    assert changed(g) == [(SETTING, "sdpa")]
    assert g.attempts[-1].patches[0].effect.name == "OUTPUT_PRESERVING"
    assert llama.config._attn_implementation == "eager"


def test_a_plain_call_of_an_encoder_runs_without_its_scores():
    classifier = made("BertForSequenceClassification", num_labels=3)

    def call():
        with torch.no_grad():
            return classifier(**prompt(pads=0))

    whole, other, g = whole_and_in_parts(call, 0.6)

    assert_same(whole, other)
    assert changed(g) == [(SETTING, "sdpa")]


def test_inseparable_rows_run_together_without_their_scores(llama):
    """A hook of the user's sees the batch: it still sees all of it, once more."""
    seen = []
    llama.model.register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state.shape[0])
    )

    def call():
        with torch.no_grad():
            return llama(**prompt(rows=3)).logits[:, -1]

    whole, other, g = whole_and_in_parts(call, 0.6)

    assert_same(whole, other)
    assert changed(g) == [(SETTING, "sdpa")]
    assert set(seen) == {3}


def test_where_the_scores_are_asked_for_the_call_is_not_changed(llama):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        whole_and_in_parts(
            lambda: llama.generate(
                **prompt(), **GREEDY, return_dict_in_generate=True, output_attentions=True
            ),
            0.6,
        )

    assert "output_attentions needs the scores" in "".join(raised.value.__notes__)


def test_attention_stands_as_it_was_after_a_failure(llama):
    with pytest.raises(ValueError, match="stop"), use_attention(llama, "sdpa"):
        assert llama.config._attn_implementation == "sdpa"
        raise ValueError("stop")

    assert llama.config._attn_implementation == "eager"


def test_a_model_that_caps_its_scores_is_not_changed():
    gemma = made("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8)

    assert "gemma2 were not compared with other attention" in why_not_use_attention(gemma, {})


KINDS = [
    ("gpt2", "AutoModelForCausalLM"),
    ("bert", "AutoModelForMaskedLM"),
    ("t5", "AutoModelForSeq2SeqLM"),
]


def test_each_kind_of_model_gives_the_same_without_its_scores(subtests, tiny_of):
    for family, head in KINDS:
        with subtests.test(family=family, head=head):
            assert family in _families()
            model = tiny_of(family, head)
            ids = prompt(rows=2, tokens=64)["input_ids"]
            mask = torch.ones_like(ids)
            mask[1, slice(0, 12) if head == "AutoModelForCausalLM" else slice(50, None)] = 0
            given = {"input_ids": ids, "attention_mask": mask}
            if head == "AutoModelForSeq2SeqLM":
                given["decoder_input_ids"] = ids[:, :16]
            with torch.no_grad():
                with_scores = model(**given).logits
                with use_attention(model, "sdpa"):
                    assert model.config._attn_implementation == "sdpa"
                    without = model(**given).logits

            seen = slice(None) if head == "AutoModelForSeq2SeqLM" else mask.bool()
            largest = with_scores[seen].abs().max().item()
            torch.testing.assert_close(
                without[seen], with_scores[seen], rtol=0, atol=2e-5 * largest
            )


@pytest.fixture
def tiny_of(monkeypatch):
    """A tiny model of a family, with weights so large that its attention prefers some tokens to others."""
    from pathlib import Path

    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from support.call_models import make_model

    def make(family, head):
        case = {
            "family": family,
            "head": head,
            "hidden": 64,
            "layers": 2,
            "vocab": VOCAB,
            "number": 0,
        }
        model = make_model(case)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        return model

    return make
