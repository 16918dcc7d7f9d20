"""After and under a guard, models and their methods can be pickled, copied and sent to other processes."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.ones(2, 4, dtype=torch.long)


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, pad_token_id=0, eos_token_id=None
    )
    return transformers.LlamaForCausalLM(config).eval()


def answer(generate):
    return generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2, do_sample=False)


def test_bound_method_pickles_and_copies_under_and_after_a_guard(subtests, model):
    whole = answer(model.generate)
    with oomguard.guard():
        under = pickle.dumps(model.generate), copy.copy(model.generate), copy.deepcopy(model)
    for name, generate in (
        ("pickled under a guard", pickle.loads(under[0])),
        ("copied under a guard", under[1]),
        ("of a model copied under a guard", under[2].generate),
        ("pickled after it", pickle.loads(pickle.dumps(model.generate))),
    ):
        with subtests.test(name):
            assert torch.equal(answer(generate), whole)


def test_a_bound_method_is_sent_to_another_process(model):
    whole = answer(model.generate)
    with oomguard.guard(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert torch.equal(pool.submit(answer, model.generate).result(), whole)
