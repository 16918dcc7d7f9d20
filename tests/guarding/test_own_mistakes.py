"""A mistake of oomguard's own, or arguments that the call itself refuses: what is raised is the call's own exception."""

from __future__ import annotations

import pytest

import oomguard
from oomguard.guarding.micro_batch import in_parts

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import made, padded  # noqa: E402
from transformers import LogitsProcessor  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 2}


@pytest.fixture(scope="module")
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def small(llama):
    with limit_memory("4 GiB") as device:
        llama.generate(**padded(), **GREEDY)
        capacity = int(device.peak_bytes * 0.6)
    with limit_memory(capacity):
        yield


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_other_error_is_raised_as_without_a_guard(subtests, llama):
    for name, options in [
        ("one", {"logits_processor": Own()}),
        ("text", {"num_beams": "2", "return_dict_in_generate": True}),
    ]:
        with subtests.test(name):
            with pytest.raises(Exception) as bare:  # noqa: PT011 - the same is expected below
                llama.generate(**padded(), **GREEDY, **options)
            with oomguard.guard(), pytest.raises(bare.type) as guarded:
                llama.generate(**padded(), **GREEDY, **options)

            assert str(guarded.value) == str(bare.value)


def test_failed_call_that_cannot_be_split_raises_its_error(llama, small, monkeypatch):
    from oomguard.engines.transformers.generate import GenerateCall

    monkeypatch.setattr(GenerateCall, "part", lambda *_: 1 / 0)
    with oomguard.guard(), pytest.raises(torch.OutOfMemoryError) as caught:
        llama.generate(**padded(), **GREEDY)

    assert "a bug in oomguard: ZeroDivisionError" in "".join(caught.value.__notes__)


def test_a_later_call_that_cannot_be_read_runs_as_it_is(llama, small, monkeypatch):
    from oomguard.engines.transformers.generate import GenerateCall

    few = padded(4)
    expected = llama.generate(**few, **GREEDY)
    with oomguard.guard():
        llama.generate(**padded(), **GREEDY)
        monkeypatch.setattr(GenerateCall, "not_splittable", property(lambda call: 1 / 0))
        assert torch.equal(llama.generate(**few, **GREEDY), expected)


def test_call_is_unchanged_if_its_parts_cannot_begin():
    from oomguard.guarding.function_call import RowsCall

    def work(rows):
        return [torch.rand(1).item() for _ in rows]

    call = RowsCall.of(work, ("rows",), ([1, 2],), {})
    torch.manual_seed(3)
    expected = work([1, 2])
    torch.manual_seed(3)
    result, error = in_parts(oomguard.guard()._state, work, _Broken(call))
    assert (result, error) == (expected, None)


class _Broken:
    """A call whose own reading fails, after random numbers were drawn."""

    def __init__(self, call):
        self._call = call

    def __getattr__(self, name):
        if name == "pad_value":
            torch.rand(1)
            raise ZeroDivisionError
        return getattr(self._call, name)
