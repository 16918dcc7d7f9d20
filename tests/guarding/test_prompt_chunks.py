"""One row that is too long: its prompt is processed in chunks, and gives the same tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, assert_same, made, whole_and_in_parts  # noqa: E402

from oomguard.engines.transformers.inputs import name_in  # noqa: E402

TOKENS = 384
GREEDY = {"do_sample": False, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def llama():
    model = made(
        "LlamaForCausalLM",
        attention="sdpa",
        bos_token_id=1,
        eos_token_id=None,
        max_position_embeddings=1024,
    )
    model.generation_config.pad_token_id = 0
    return model


def prompt(rows=1, tokens=TOKENS, seed=1):
    ids = torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def chunks(g):
    return [
        patch.new
        for attempt in g.attempts
        for patch in attempt.patches
        if patch.setting == "prefill_chunk_size"
    ]


def test_a_long_row_gives_the_same_tokens_in_chunks(subtests, llama):
    def check(options):
        def call():
            torch.manual_seed(5)
            return llama.generate(**prompt(), **{**GREEDY, **options})

        whole, parts, g = whole_and_in_parts(call, 0.6)

        assert_same(whole, parts)
        assert len(chunks(g)) == 1
        assert g.attempts[-1].patches[0].effect.name == "OUTPUT_PRESERVING"

    for name, options in [
        ("samples", {"do_sample": True}),
    ]:
        with subtests.test(name):
            check(options)


def test_a_cache_of_the_users_goes_on_from_where_it_stood(llama):
    def call():
        cache = transformers.DynamicCache(config=llama.config)
        first = llama.generate(**prompt(tokens=40), **GREEDY, **{name_in(llama): cache})
        ids = torch.cat([first, prompt(seed=2)["input_ids"]], 1)
        second = llama.generate(
            ids, attention_mask=torch.ones_like(ids), **GREEDY, **{name_in(llama): cache}
        )
        return second, cache.get_seq_length(), cache

    whole, parts, g = whole_and_in_parts(call, 0.6)

    assert_same(whole, parts)
    assert chunks(g)


def test_what_a_prompt_in_chunks_would_change_is_told(subtests, llama):
    def check(options, reason):
        with pytest.raises(torch.OutOfMemoryError) as raised:
            whole_and_in_parts(lambda: llama.generate(**prompt(), **GREEDY, **options), 0.6)

        assert reason in "".join(raised.value.__notes__)

    for options, reason in [
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "prefill_chunk_size: chunked prefill cannot be combined with output_hidden_states",
        ),
    ]:
        with subtests.test(options=options, reason=reason):
            check(options, reason)
