"""A later call that begins in parts and is then run whole gives what it gives without a guard."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import made, padded  # noqa: E402
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList  # noqa: E402

from oomguard.engines.transformers.inputs import name_in  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 2}
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free."


@pytest.fixture
def llama():
    model = made("LlamaForCausalLM", bos_token_id=1, eos_token_id=None)
    model.generation_config.pad_token_id = 0
    return model


def fails_once(model, draws):
    """The model, whose next call fails for memory, and whose later ones draw a number where ``draws`` is true."""
    forward, failures = model.model.forward, [True]

    def own(*args, **kwargs):
        if failures and failures.pop():
            raise torch.OutOfMemoryError(MESSAGE)
        if draws:
            torch.rand(1)
        return forward(*args, **kwargs)

    model.model.forward = own


class Centres(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores - scores.mean(0)


class Streamer:
    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        pass


def seeded(model, batch, **options):
    torch.manual_seed(7)
    return model.generate(**batch, max_new_tokens=6, **options)


def test_processors_find_what_they_find_without_a_guard(subtests, llama):
    for name, options in [
        (
            "sampling",
            lambda: {"do_sample": True, "logits_processor": LogitsProcessorList([Centres()])},
        ),
    ]:
        with subtests.test(name):
            vars(llama.model).pop("forward", None)
            expected = seeded(llama, padded(), **options())
            draws = []
            fails_once(llama, draws)
            with oomguard.guard():
                llama.generate(**padded(), **GREEDY)
                assert torch.equal(seeded(llama, padded(), **options()), expected)


def test_generators_stand_where_the_call_found_them(llama):
    draws = []
    fails_once(llama, draws)
    with oomguard.guard() as g:
        llama.generate(**padded(), **GREEDY)
        draws.append(True)
        tokens = seeded(llama, padded(), do_sample=True)
    assert torch.equal(tokens, seeded(llama, padded(), do_sample=True))
    assert g.attempts[-1].error == ""


def test_a_cache_of_the_users_and_its_streamer_are_filled_once(subtests, llama):
    def check(rows):
        vars(llama.model).pop("forward", None)
        long = {name: value.repeat(1, 4) for name, value in padded(rows).items()}
        one = {name: value[:1] for name, value in long.items()}

        def filled(batch):
            cache, streamer = DynamicCache(config=llama.config), Streamer() if rows == 1 else None
            tokens = seeded(
                llama, batch, do_sample=True, streamer=streamer, **{name_in(llama): cache}
            )
            return tokens.tolist(), cache.get_seq_length(), streamer and streamer.given

        draws = [True]
        fails_once(llama, draws)
        with pytest.raises(torch.OutOfMemoryError):
            llama.generate(**one, **GREEDY)
        expected = filled(long)
        del llama.model.forward
        draws.clear()
        fails_once(llama, draws)
        with oomguard.guard():
            llama.generate(**one, **GREEDY)
            draws.append(True)
            assert filled(long) == expected

    for rows in [1]:
        with subtests.test(rows=rows):
            check(rows)
