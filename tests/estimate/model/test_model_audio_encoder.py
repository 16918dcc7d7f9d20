"""What of an encoder-decoder model's configuration says how long its audio is, and what its decoder keeps."""

from __future__ import annotations

from oomguard.estimate.model.layer_caches import layer_caches
from oomguard.estimate.model.model import read_audio_encoder
from oomguard.estimate.model.shape import read_shape

# The numbers of openai/whisper-large-v3-turbo: its encoder is deeper than its decoder.
WHISPER = {
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_layers": 4,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "num_hidden_layers": 32,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "vocab_size": 51866,
    "torch_dtype": "float16",
}


def test_the_decoder_s_numbers_count_and_not_the_encoder_s():
    shape = read_shape(WHISPER)
    assert (shape.layers, shape.heads, shape.head_dim, shape.max_positions) == (4, 20, 64, 448)
    assert shape.has_encoder


def test_each_layer_keeps_its_tokens_and_the_encoders_output():
    caches = layer_caches(read_shape(WHISPER), kv_element_bytes=2)
    assert [cache.kind for cache in caches] == ["full", "cross"] * 4
    assert {cache.token_bytes for cache in caches} == {2 * 20 * 64 * 2}


def test_audio_length_is_the_encoders_positions():
    encoder = read_audio_encoder(WHISPER, 1280)
    assert encoder is not None
    assert (encoder.tokens_per_item, encoder.mlp_width, encoder.modality) == (1500, 5120, "audio")
    assert not encoder.in_prompt


def test_an_encoder_without_its_numbers_is_none(subtests):
    for config in [
        {**WHISPER, "max_source_positions": None},
        {**WHISPER, "encoder_ffn_dim": "5120"},
        {**WHISPER, "model_type": ["whisper"]},
        {"model_type": "llama"},
    ]:
        with subtests.test(config=config):
            assert read_audio_encoder(config, 1280) is None
