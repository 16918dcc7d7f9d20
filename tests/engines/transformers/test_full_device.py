"""What the guard computes of a call's arguments takes nothing of the device, which is full when a call has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import oomguard

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.forward_variants import has_leading_padding  # noqa: E402
from oomguard.engines.transformers.inputs import media_of, why_packed  # noqa: E402
from oomguard.estimate.call.fake_generate import is_full  # noqa: E402
from oomguard.testing import limit_memory  # noqa: E402

ROWS, IMAGE = 4, 60
IDS, MASK = torch.full((ROWS, 16), IMAGE), torch.ones(ROWS, 16, dtype=torch.long)
CONFIG = SimpleNamespace(
    image_token_id=IMAGE, audio_token_id=IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2)
)
TOWER = SimpleNamespace(_get_feat_extract_output_lengths=lambda lengths: (lengths, lengths // 2))
MODEL = SimpleNamespace(config=CONFIG, audio_tower=TOWER)
SEVERAL = type("Idefics3ForConditionalGeneration", (), {"config": CONFIG})()


def media(model, **given):
    return lambda: media_of(model, given, IDS).starts


CASES = {
    "images by their tokens": media(MODEL, pixel_values=torch.ones(ROWS, 3, 8, 8)),
    "patches": media(
        MODEL,
        pixel_values=torch.ones(64 * ROWS, 8),
        image_grid_thw=torch.tensor([[1, 8, 8]] * ROWS),
    ),
    "sounds": media(
        MODEL,
        input_features=torch.ones(ROWS, 8, 32),
        feature_attention_mask=torch.ones(ROWS, 32, dtype=torch.long),
    ),
    "several images a row": media(SEVERAL, pixel_values=torch.ones(ROWS, 2, 3, 8, 8)),
    "positions": lambda: why_packed(
        {"position_ids": POSITIONS, "attention_mask": MASK},
    ),
    "padding before a row": lambda: has_leading_padding(MASK),
    "what a mask hides": lambda: is_full(MASK),
}
POSITIONS = torch.arange(16).expand(ROWS, -1)


def test_it_needs_no_room_there(subtests):
    for name, value in CASES.items():
        with subtests.test(name=name):
            expected = value()
            with limit_memory("8 KiB") as device:
                held = torch.zeros(2048)
                assert device.free_bytes == 0
                with pytest.raises(torch.OutOfMemoryError):
                    held + 1
                assert value() == expected


def test_note_names_weights_and_inputs_that_do_not_fit():
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    text = {**sizes, "vocab_size": 300, "head_dim": 8, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**sizes, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=290,
        boi_token_index=291,
        eoi_token_index=292,
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    ids = torch.randint(5, 280, (16, 20))
    ids[:, 4], ids[:, 5:9], ids[:, 9] = 291, 290, 292
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": (ids == 290).long(),
        "pixel_values": torch.randn(16, 3, 56, 56),
    }
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    held = weights + sum(tensor.nbytes for tensor in given.values())

    def call():
        with torch.inference_mode():
            return model.generate(**given, max_new_tokens=4, do_sample=False)

    with limit_memory("1 GiB"):
        whole = call()
    with (
        limit_memory(held - 2**14),
        oomguard.guard(),
        pytest.raises(torch.OutOfMemoryError) as raised,
    ):
        call()
    assert "mistake" not in "".join(raised.value.__notes__)
    with limit_memory(int(held * 1.3)), oomguard.guard() as g:
        parts = call()
    assert torch.equal(parts, whole)
    assert [attempt.succeeded for attempt in g.attempts] == [False, True]
