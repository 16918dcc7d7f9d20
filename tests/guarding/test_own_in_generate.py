"""Functions of the user's own in ``generate``: prefixes get each row's place, processors and criteria are shown the whole batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, made, padded, whole_and_in_parts  # noqa: E402
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


class Favour(LogitsProcessor):
    """Another token for each row of the batch."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, self.tokens[row % len(self.tokens)]] += 0.05
        return scores


class Centres(LogitsProcessor):
    """Scores less their mean over the batch."""

    def __call__(self, input_ids, scores):
        return scores - scores.mean(0)


class Ends(StoppingCriteria):
    """Ends a row at some tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 4 == 0


def processors(*own):
    return {"logits_processor": LogitsProcessorList(own)}


def criteria(*own):
    return {"stopping_criteria": StoppingCriteriaList(own)}


def test_what_hangs_on_a_row_and_its_place_gives_the_same_tokens(subtests, llama):
    def check(own):
        def call():
            torch.manual_seed(3)
            return llama.generate(**padded(), **{**GREEDY, **own()})

        whole, parts, g = whole_and_in_parts(call)

        assert_same(whole, parts)
        assert g.attempts[-1].patches[0].setting == "batch_size"

    for name, own in [
        (
            "a processor by place, and rows that end",
            lambda: {**criteria(Ends()), **processors(Favour([11, 12, 13])), "max_new_tokens": 6, "eos_token_id": 9},
        ),
    ]:
        with subtests.test(name):
            check(own)


def test_what_hangs_on_more_is_told_and_not_run_in_parts(subtests, llama):
    def check(own, reason):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            whole_and_in_parts(lambda: llama.generate(**padded(), **GREEDY, **own()))

        assert reason in "".join(raised.value.__notes__)
        assert not hasattr(raised.value, "partial")  # no row is known to be one of the whole call

    for own, reason in [
        (lambda: processors(Centres()), "Centres gives a row other scores beside other rows"),
    ]:
        with subtests.test(own=own, reason=reason):
            check(own, reason)
