"""After and under a guard, models and their methods can be pickled, copied and sent to other processes."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

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


def test_a_bound_method_is_sent_by_joblib(model):
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    whole = answer(model.generate)
    with oomguard.guard():
        (sent,) = joblib.Parallel(n_jobs=2)([joblib.delayed(answer)(model.generate)])
    assert torch.equal(sent, whole)


def short_of_memory(model, rows):
    """The tokens of a guarded call on a device that is too small for all rows."""
    ids = torch.arange(rows * 64).reshape(rows, 64) % 60 + 1
    ones = torch.ones_like(ids)
    with limit_memory("2.5 MiB") as device, oomguard.guard() as g:
        device.adopt(model.parameters())
        tokens = model.generate(ids, attention_mask=ones, max_new_tokens=2, do_sample=False)
    return tokens, [attempt.error for attempt in g.attempts]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_after_and_under_a_guard_splits_calls_too(subtests, model):
    whole = short_of_memory(model, 64)
    assert whole[1] == ["OutOfMemoryError", ""]
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        after = pool.submit(short_of_memory, model, 64).result()
    with oomguard.guard(), ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        under = pool.submit(short_of_memory, model, 64).result()
    for name, (tokens, errors) in (("after", after), ("under", under)):
        with subtests.test(name):
            assert torch.equal(tokens, whole[0])
            assert errors == whole[1]
