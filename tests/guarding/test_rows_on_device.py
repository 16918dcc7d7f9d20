"""A call that fits leaves a result of which a program computes something that has no room: that is made part by part."""

from __future__ import annotations

import copy
import io
import pickle

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

F = torch.nn.functional
ROWS, TOKENS, VOCAB = 16, 32, 2000
LOGITS_BYTES = 4 * ROWS * TOKENS * VOCAB
IDS = torch.randint(3, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCAB, pad_token_id=0)).eval()


def _perplexity(logits):
    targets = IDS[:, 1:].reshape(-1)
    return (
        F.cross_entropy(logits[:, :-1].contiguous().view(-1, VOCAB), targets, reduction="none").view(ROWS, -1).mean(1)
    )


def _in_place(logits):
    logits.div_(0.7)
    return logits.log_softmax(-1)[:, 0] + logits[:, 0]


PROGRAMS = {
    "log-likelihoods": lambda x: F.log_softmax(x, dim=-1).gather(2, IDS[..., None]).squeeze(-1).sum(-1),
    "perplexity": _perplexity,
    "temperature": lambda x: (x / 0.7).softmax(-1)[:, -1].argmax(-1),
    "in place": _in_place,
    "dropout": lambda x: F.dropout(x, 0.5)[:, :2].sum(-1),
}
DRAWS = {"dropout"}  # for all rows at once


def run(model, name, mode):
    torch.manual_seed(7)
    with mode():
        return PROGRAMS[name](model(IDS, use_cache=False).logits)


def test_what_has_no_room_beside_the_logits_equals_what_a_larger_device_gives(subtests, model):
    for mode in [torch.no_grad, torch.inference_mode]:
        for name in sorted(PROGRAMS.keys() - DRAWS):
            with subtests.test(mode=mode, name=name):
                whole = run(model, name, mode)
                with limit_memory(LOGITS_BYTES * 7 // 4), pytest.raises(torch.OutOfMemoryError):
                    run(model, name, mode)
                with limit_memory(LOGITS_BYTES * 7 // 4), oomguard.guard() as g:
                    found = run(model, name, mode)

                assert_same(whole, found)
                assert not g.attempts  # the call of the model fits


def test_where_there_is_room_a_result_is_an_ordinary_tensor_and_draws_the_same(subtests, model):
    for name in PROGRAMS:
        with subtests.test(name=name):
            whole = run(model, name, torch.no_grad)
            with limit_memory(LOGITS_BYTES * 8), oomguard.guard(), torch.no_grad():
                assert type(model(IDS, use_cache=False).logits) is torch.Tensor
                assert_same(whole, run(model, name, torch.no_grad))


def test_it_lies_on_its_device_and_is_stored_and_copied_as_an_ordinary_tensor(model):
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        with limit_memory(LOGITS_BYTES * 7 // 4), oomguard.guard():
            logits = model(IDS, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    assert type(logits) is not torch.Tensor
    assert logits.data_ptr()
    stored = io.BytesIO()
    torch.save(logits, stored)
    stored.seek(0)
    for other in (torch.load(stored), pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits)):
        assert type(other) is torch.Tensor
        torch.testing.assert_close(other, whole)


def test_what_needs_all_rows_at_once_fails_in_the_devices_words_and_an_error_stays_what_it_is(model):
    with limit_memory(LOGITS_BYTES * 7 // 4), oomguard.guard(), torch.no_grad():
        logits = model(IDS, use_cache=False).logits
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.fft.fft(logits)
        with pytest.raises(IndexError):
            logits.softmax(5)
