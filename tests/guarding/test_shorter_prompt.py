"""A prompt that is too long for the device: cut only where that is permitted, no further than it must be, and last of all."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, made  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

PROMPT, HALF, NEW = 192, 96, 3
OTHERS = ["prefill_chunk_size", "cache_implementation", "attn_implementation"]


@pytest.fixture(scope="module")
def llama():
    ends = {"bos_token_id": 1, "eos_token_id": None}
    model = made(
        "LlamaForCausalLM",
        attention="sdpa",
        num_hidden_layers=2,
        max_position_embeddings=1024,
        **ends,
    )
    model.generation_config.pad_token_id = 0
    return model


def ids_of(rows=1, tokens=PROMPT):
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(1))


def call(model, ids, **options):
    return model.generate(
        **{
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": NEW,
            **options,
        }
    )


def capacity_of(model, **options):
    """Room for a row of about half of the prompt."""
    with limit_memory("4 GiB") as device:
        call(model, ids_of(tokens=HALF), **options)
        return device.peak_bytes


def changes(g):
    return {patch.setting: patch.new for attempt in g.attempts for patch in attempt.patches}


def test_prompt_is_not_cut_without_permission(
    llama,
):
    with (
        limit_memory(capacity_of(llama)),
        oomguard.guard(pin=OTHERS),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call(llama, ids_of())

    (note,) = [
        line
        for line in "\n".join(raised.value.__notes__).splitlines()
        if "truncate_prompt_tokens" in line
    ]
    assert "--allow changes-outputs permits it" in note


def test_what_changes_no_output_comes_before_it(llama):
    with limit_memory(capacity_of(llama)), oomguard.guard(allow="changes-outputs") as g:
        answer = call(llama, ids_of())

    assert torch.equal(answer, call(llama, ids_of()))
    assert "truncate_prompt_tokens" not in changes(g)


def test_answer_continues_from_the_prompts_last_tokens(llama):
    ids = ids_of()
    with (
        limit_memory(capacity_of(llama)),
        oomguard.guard(allow="changes-outputs", pin=[*OTHERS, "max_new_tokens"]) as g,
    ):
        answer = call(llama, ids)
    kept = changes(g)["truncate_prompt_tokens"]

    assert kept <= HALF
    assert torch.equal(answer[:, :PROMPT], ids)
    assert torch.equal(answer[:, PROMPT:], call(llama, ids[:, -kept:])[:, kept:])


def test_rows_run_apart_keep_the_order_and_each_its_own_prompt(llama):
    ids = ids_of(rows=2)
    with (
        limit_memory(capacity_of(llama)),
        oomguard.guard(allow="changes-outputs", pin=[*OTHERS, "max_new_tokens"]) as g,
    ):
        answer = call(llama, ids)
    kept = changes(g)["truncate_prompt_tokens"]

    assert torch.equal(answer[:, :PROMPT], ids)
    assert torch.equal(answer[:, PROMPT:], call(llama, ids[:, -kept:])[:, kept:])


def test_an_encoder_keeps_the_first_tokens():
    model = made(
        "T5ForConditionalGeneration",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    ids = ids_of()
    pinned = [*OTHERS, "max_new_tokens"]
    with limit_memory(capacity_of(model)), oomguard.guard(allow="changes-outputs", pin=pinned) as g:
        answer = call(model, ids)
    kept = changes(g)["truncate_prompt_tokens"]

    assert torch.equal(answer, call(model, ids[:, :kept]))


def test_what_needs_the_whole_prompt_keeps_it(subtests, llama):
    for options, why in [
        ({"min_length": PROMPT + 1}, "min_length includes the prompt"),
    ]:
        with subtests.test(options=options, why=why):
            with (
                limit_memory(capacity_of(llama)),
                oomguard.guard(allow="changes-outputs", pin=OTHERS),
                pytest.raises(torch.OutOfMemoryError) as raised,
            ):
                call(llama, ids_of(), **options)

            assert why in "\n".join(raised.value.__notes__)
