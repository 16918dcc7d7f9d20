"""The largest image is the one that ``mm_processor_kwargs`` permits."""

import json
from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.vision_encoder import Encoder, read_vision_encoder
from oomguard.estimate.start.encoder_profile import apply_processor_settings
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import solve

START = VllmSettings(
    Version("0.19.0"),
    24 * GIB,
    0.9,
    max_model_len=32768,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
)
QWEN25 = {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
}
INTERN = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "max_dynamic_patch": 12,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 448,
    },
}


def tokens(config, **arguments):
    return apply_processor_settings(
        read_vision_encoder(config, {}, 2048), json.dumps(arguments)
    ).tokens_per_item


def test_an_image_has_as_many_pixels_as_the_user_permits(subtests):
    for arguments, expected in [
        ({"max_pixels": 1003520}, 1280),
        ({"size": {"shortest_edge": 3136, "longest_edge": 1003520}}, 1280),
        ({"images_kwargs": {"max_pixels": 1003520}}, 1280),
        ({"min_pixels": 784, "fps": 1}, 16384),
        ({"max_pixels": 10}, 1),
    ]:
        with subtests.test(arguments=arguments, expected=expected):
            assert tokens(QWEN25, **arguments) == expected


def test_an_image_is_cut_into_as_many_tiles_as_the_user_permits():
    assert (tokens(INTERN), tokens(INTERN, max_dynamic_patch=2)) == (13 * 256, 3 * 256)


def test_an_encoder_of_one_size_stays_as_it_is():
    plain = Encoder(8, 16, 2, 4, 256, 32)
    assert apply_processor_settings(plain, '{"max_pixels": 1000}') == plain
    assert (
        apply_processor_settings(replace(plain, pixels_per_token=784), None).tokens_per_item == 256
    )


def test_non_object_arguments_are_refused_with_an_example(subtests):
    for given in ["", "{", "[1]", "12", '"max_pixels"']:
        with subtests.test(given=given):
            with pytest.raises(SettingError, match="mm_processor_kwargs") as refused:
                apply_processor_settings(Encoder(8, 16, 2, 4, 256, 32), given)
            assert "max_pixels" in refused.value.hint


def test_length_may_be_as_short_as_the_largest_image():
    text = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 128000,
    }
    model = read_model(ModelFiles("vl", "config.json", {**text, **QWEN25}, ()))
    pool = replace(START, kv_cache_memory_bytes=8192 * 36 * 2 * 2 * 128 * 2)  # of some 8,192 tokens
    assert solve(model, pool, "max_model_len") is None  # an image has 16,384
    smaller = solve(
        model, replace(pool, mm_processor_kwargs='{"max_pixels": 1003520}'), "max_model_len"
    )
    assert smaller is not None
    assert 1280 < smaller.settings.max_model_len <= 8192
