"""An answer that is too long for the device: cut only where that is permitted, and no further than it must be."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import VOCAB, made  # noqa: E402

from oomguard.testing import limit_memory  # noqa: E402

NEW, PROMPT = 64, 4
OTHERS = ["cache_implementation", "prefill_chunk_size"]


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


def call(model, rows=1, new=NEW):
    ids = torch.randint(3, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new
    )


@pytest.fixture(scope="module")
def capacity(llama):
    """Room for a row of about half of the tokens."""
    with limit_memory("4 GiB") as device:
        call(llama, new=NEW // 2)
        return device.peak_bytes


def test_answer_is_not_cut_without_permission(llama, capacity):
    with (
        limit_memory(capacity),
        oomguard.guard(pin=OTHERS) as g,
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call(llama)

    (note,) = [
        line for line in "\n".join(raised.value.__notes__).splitlines() if "max_new_tokens=" in line
    ]
    assert "--allow changes-outputs permits it" in note
    assert not any(attempt.patches for attempt in g.attempts)


def test_cut_answer_is_the_beginning_of_the_whole_one(llama, capacity):
    whole = call(llama)
    with limit_memory(capacity), oomguard.guard(allow="changes-outputs", pin=OTHERS) as g:
        cut = call(llama)
        short = call(llama, new=8)

    assert torch.equal(cut, whole[:, : cut.shape[1]])
    assert (
        NEW // 4 <= cut.shape[1] - PROMPT <= NEW // 2
    )  # by a closed form, which is above what so small a model needs
    assert {(p.setting, p.effect.name) for a in g.attempts for p in a.patches} == {
        ("max_new_tokens", "CHANGES_OUTPUTS")
    }
    assert short.shape[1] == PROMPT + 8


def test_a_least_number_of_new_tokens_is_kept(llama, capacity):
    ids = torch.randint(3, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
    with (
        limit_memory(capacity),
        oomguard.guard(allow="changes-outputs"),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        llama.generate(ids, **options, min_new_tokens=NEW - 10)

    assert "max_new_tokens=" not in "".join(raised.value.__notes__)
