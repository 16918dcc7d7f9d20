"""``generate`` called by keyword for images or sound: rows are those of the model's own main input."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from model_calls import assert_same, whole_and_in_parts  # noqa: E402

from oomguard.engines.transformers.generate import GenerateCall  # noqa: E402

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4}


@pytest.fixture(scope="module")
def captions():
    torch.manual_seed(0)
    sees = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    encoder = transformers.ViTModel(transformers.ViTConfig(**sees, image_size=32, patch_size=8))
    decoder = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, **SIZES, add_cross_attention=True)
    )
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    config = model.generation_config
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 1, 0, None
    return model


def test_images_by_keyword_are_split_by_rows(captions):
    images = torch.randn(16, 3, 32, 32)
    whole, parts, g = whole_and_in_parts(
        lambda: captions.generate(pixel_values=images, max_length=8), 0.85
    )
    assert_same(whole, parts)
    assert [attempt.error for attempt in g.attempts] == ["OutOfMemoryError", ""]


def test_images_beside_text_are_cut_with_its_rows(captions):
    ids = torch.ones(2, 3, dtype=torch.long)
    call = GenerateCall.of(
        captions, (), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    )
    assert call.rows == 2
    assert call.not_splittable is None
    _, kwargs = call.part(1, 2)
    assert len(kwargs["input_ids"]) == len(kwargs["pixel_values"]) == 1


class Sound(transformers.VisionEncoderDecoderModel):
    """Its ``generate`` is its own, and gives sound."""

    output_modalities = ("audio",)

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)


def test_model_that_generates_sound_is_refused_before_a_part(captions):
    model = Sound(encoder=captions.encoder, decoder=captions.decoder).eval()
    call = GenerateCall.of(model, (), {"pixel_values": torch.randn(2, 3, 32, 32)})
    assert call.not_splittable == "generate of Sound gives audio, not one row of tokens per input"
