"""``generate`` whose model guesses tokens with its first layers: a failure in it is remedied, and leaves the model as it was."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

LAYERS = 4


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=LAYERS, pad_token_id=0, bos_token_id=1, eos_token_id=None
    )
    return transformers.LlamaForCausalLM(config).eval()


def guess(model):
    ids = torch.randint(3, 64, (1, 200), generator=torch.Generator().manual_seed(1))
    return model.generate(ids, assistant_early_exit=2, do_sample=False, max_new_tokens=6)


def test_tokens_and_layers_are_those_of_a_call_that_fits(llama):
    whole = guess(llama)
    with limit_memory("1 GiB", fail_at=100), oomguard.guard() as g:
        tokens = guess(llama)
    assert g.attempts[0].error == "OutOfMemoryError"
    assert torch.equal(tokens, whole)
    assert llama.config.num_hidden_layers == LAYERS


def test_first_failure_returns_and_layers_are_restored(llama):
    guess(llama)
    with limit_memory("300 KiB"), pytest.raises(torch.OutOfMemoryError), oomguard.guard():
        guess(llama)
    assert llama.config.num_hidden_layers == LAYERS
