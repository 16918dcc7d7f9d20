"""A model that overrides ``generate`` is split by its own method's rows, not by what that makes of them."""

from __future__ import annotations

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.testing import limit_memory  # noqa: E402

ROWS, FRAMES = 32, 400


@pytest.fixture
def whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=64,
        max_source_positions=FRAMES // 2,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def features():
    return torch.randn(ROWS, 8, FRAMES, generator=torch.Generator().manual_seed(1))


def test_whisper_is_split_and_every_token_is_the_same(whisper, features):
    options = {"max_new_tokens": 6, "do_sample": False}
    with limit_memory("1 GiB") as device:
        whole = whisper.generate(input_features=features, **options)
        capacity = device.peak_bytes // 2
    with limit_memory(capacity), oomguard.guard() as g:
        parts = whisper.generate(input_features=features, **options)
    assert torch.equal(parts, whole)
    assert [attempt.succeeded for attempt in g.attempts] == [False, True]


def tiny():
    return transformers.GPT2Config(
        vocab_size=512,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )


def test_lists_with_one_entry_per_row_are_cut_or_block_a_split(subtests):
    for name, value, splits in [
        ("adapter_names", ["a", "b", "c", "d"], True),
        ("adapter_names", ["a", "b"], False),
        ("eos_token_id", [1, 2, 3, 4], True),
        ("labels_of_rows", [1, 2, 3, 4], False),
        ("labels_of_rows", [1, 2, 3], True),
    ]:
        with subtests.test(name=name, value=value, splits=splits):
            from oomguard.engines.transformers.generate import GenerateCall

            model = transformers.GPT2LMHeadModel(tiny()).eval()
            call = GenerateCall.of(
                model, (), {"input_ids": torch.zeros(4, 5, dtype=torch.long), name: value}
            )
            assert (call.not_splittable is None) is splits
            if name == "adapter_names" and splits:
                assert call.part(1, 3)[1]["adapter_names"] == ["b", "c"]
