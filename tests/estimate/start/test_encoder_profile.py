"""What the vision encoder takes while vLLM profiles it, held against published starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.facts import GIB
from oomguard.estimate.model.files import ModelFiles
from oomguard.estimate.model.model import read_model
from oomguard.estimate.model.vision_encoder import read_vision_encoder
from oomguard.estimate.start.encoder_profile import profile_encoder, profiled_seats
from oomguard.estimate.start.start import VllmSettings
from oomguard.estimate.start.start_budget import budget_start, fit

SETTINGS = VllmSettings(
    version=Version("0.19"),
    gpu_total_bytes=80 * GIB,
    gpu_memory_utilization=0.9,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
)
QWEN25 = {
    "model_type": "qwen2_5_vl",
    "video_token_id": 151656,
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "hidden_act": "silu",
    },
}
GEMMA3 = {
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 896,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def test_a_published_start_of_qwen2_5_vl_3b_is_met():
    """4.06 GiB with two images of 16384 tokens: 32768 tokens in one step of vLLM 0.7 to 0.9, two images of the largest size."""
    found = profile_encoder(
        read_vision_encoder(QWEN25, {}, 2048), replace(SETTINGS, max_num_batched_tokens=32768), 2
    )
    assert (found.items, found.tokens_per_item) == (2, 16384)
    assert found.peak_bytes / GIB == pytest.approx(4.06, rel=0.05)


def test_video_counts_as_the_whole_images_that_fit_a_request(subtests):
    for version, length, limits, modality, tokens in [
        ("0.23", 128000, None, "video", 114688),
        ("0.23", 60000, None, "video", 49152),
        ("0.23", 128000, '{"image": 1}', "video", 114688),
        ("0.23", 128000, "image=1,video=0", "image", 16384),
        ("0.23", 20000, None, "image", 16384),
        ("0.10.2", 256000, None, "video", 131072),
        ("0.9.2", 60000, None, "video", 32768),
    ]:
        with subtests.test(
            version=version, length=length, limits=limits, modality=modality, tokens=tokens
        ):
            asked = replace(
                SETTINGS, version=Version(version), max_model_len=length, limit_mm_per_prompt=limits
            )
            found = profile_encoder(read_vision_encoder(QWEN25, {}, 3584), asked, 2)
            assert (found.modality, found.items, found.tokens_per_item) == (modality, 1, tokens)


def test_published_start_refused_for_videos_is_matched():
    """A Qwen2.5-VL-7B of 0.23 at its own length lacked 14.28 GiB: 15.5 of activations, by all other parts that it printed."""
    asked = replace(SETTINGS, version=Version("0.23"), max_model_len=128000)
    found = profile_encoder(read_vision_encoder(QWEN25, {}, 3584), asked, 2)
    assert found.peak_bytes / GIB == pytest.approx(15.5, rel=0.1)


def test_an_image_larger_than_a_step_is_profiled_all_the_same():
    assert profile_encoder(read_vision_encoder(QWEN25, {}, 2048), SETTINGS, 2).items == 1


def test_the_limit_of_a_prompt_bounds_the_images_of_a_step(subtests):
    for limits, images in [
        (None, 32),
        ('{"image": 4}', 32),
        ('{"image": 1, "video": 0}', 2),
        ("image=1,video=0", 2),
        ('{"image": {"count": 1}, "video": 0}', 2),
    ]:
        with subtests.test(limits=limits, images=images):
            encoder = read_vision_encoder({**GEMMA3, "video_token_id": 1}, {}, 2560)
            assert (
                profile_encoder(
                    encoder, replace(SETTINGS, max_num_seqs=2, limit_mm_per_prompt=limits), 2
                ).items
                == images
            )


def test_each_request_of_a_text_or_image_model_has_one():
    siglip = {**GEMMA3, "model_type": "siglip", "mm_tokens_per_image": None}
    found = profile_encoder(
        read_vision_encoder(siglip, {}, 768), replace(SETTINGS, max_num_seqs=256), 4
    )
    assert (found.items, found.tokens_per_item) == (256, 1)


def test_no_prompt_holds_more_images_than_its_length():
    """Two requests of 600 tokens hold two images of 256 each, though a step of 8192 tokens would hold 32."""
    asked = replace(SETTINGS, max_num_seqs=2, max_model_len=600)
    assert profile_encoder(read_vision_encoder(GEMMA3, {}, 2560), asked, 2).items == 4


def test_no_images_are_no_profile():
    assert (
        profile_encoder(
            read_vision_encoder(GEMMA3, {}, 2560),
            replace(SETTINGS, limit_mm_per_prompt='{"image": 0}'),
            2,
        )
        is None
    )


def test_a_limit_that_is_none_is_refused(subtests):
    for limits in [
        "{",
        "image",
        '{"image": "many"}',
        '{"image": -1}',
        "[1]",
        '{"image": 1e400}',
        '{"a":' * 3000,
    ]:
        with subtests.test(limits=limits), pytest.raises(SettingError, match="limit_mm_per_prompt"):
            profile_encoder(
                read_vision_encoder(GEMMA3, {}, 2560),
                replace(SETTINGS, limit_mm_per_prompt=limits),
                2,
            )


TEXT = {
    "model_type": "qwen2",
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 128000,
}


def test_plan_says_what_images_need_and_is_smaller_without(subtests):
    for name, config in [
        ("in parts", {**QWEN25, "text_config": TEXT}),
        ("flat", {**TEXT, **QWEN25}),
    ]:
        with subtests.test(name):
            model = read_model(ModelFiles("vl", "config.json", config, ()))
            asked = replace(SETTINGS, max_model_len=8192, max_num_seqs=16)
            found = budget_start(model, asked)
            none = budget_start(
                model, replace(asked, limit_mm_per_prompt='{"image": 0, "video": 0}')
            )
            assert any(
                line.startswith("images: profiled with 1 of 16384 tokens each, ")
                for line in found.assumptions
            )
            assert not any(line.startswith("images") for line in none.assumptions)
            assert found.kv_cache_pool_bytes < none.kv_cache_pool_bytes
            assert found.uncertainty_bytes > none.uncertainty_bytes


def test_unprofiled_encoder_is_loaded_and_has_no_peak():
    model = read_model(ModelFiles("vl", "config.json", {**QWEN25, "text_config": TEXT}, None))
    asked = replace(SETTINGS, max_model_len=8192, max_num_seqs=16)
    skipped = budget_start(model, replace(asked, skip_mm_profiling=True))
    none = budget_start(model, replace(asked, limit_mm_per_prompt='{"image": 0, "video": 0}'))

    assert skipped.peak_activation_bytes == none.peak_activation_bytes
    assert skipped.weights_bytes == budget_start(model, asked).weights_bytes > none.weights_bytes
    assert any("not profiled (skip_mm_profiling)" in line for line in skipped.assumptions)


def test_too_large_images_are_named_for_the_user():
    model = read_model(ModelFiles("vl", "config.json", {**QWEN25, "text_config": TEXT}, None))
    small = replace(
        SETTINGS,
        gpu_total_bytes=10 * GIB,
        max_model_len=1024,
        max_num_seqs=None,
        max_num_batched_tokens=None,
    )
    found = fit(model, small)
    assert (found.budget, found.without_images) == (None, True)
    without = replace(small, limit_mm_per_prompt='{"image": 0, "video": 0}')
    assert fit(model, without).budget is not None


def test_sampling_fits_into_what_the_images_were_profiled_with():
    model = read_model(ModelFiles("vl", "config.json", {**QWEN25, "text_config": TEXT}, ()))
    many = replace(
        SETTINGS,
        version=Version("0.32"),
        max_num_seqs=1024,
        max_num_batched_tokens=1024,
        max_model_len=8192,
    )
    assert budget_start(model, many).stages[0].unprofiled_bytes == 0
    without = budget_start(model, replace(many, limit_mm_per_prompt='{"image": 0, "video": 0}'))
    assert without.stages[0].unprofiled_bytes > 0


def test_first_engine_profiles_requests_whose_images_fit_a_step():
    encoder = read_vision_encoder(QWEN25, {}, 3584)
    assert encoder is not None
    old = replace(SETTINGS, version=Version("0.7.2"))

    assert (
        profile_encoder(encoder, old, 2) is None
    )  # an image of 16,384 tokens has no room in 8,192
    assert profiled_seats(encoder, old) == 1
    wide = replace(old, max_num_batched_tokens=40_000)
    found = profile_encoder(encoder, wide, 2)
    assert found is not None
    assert (found.items, profiled_seats(encoder, wide)) == (2, 2)


def test_video_larger_than_an_image_is_profiled_unless_excluded():
    config = {
        "model_type": "gemma4",
        "vision_soft_tokens_per_image": 280,
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "patch_size": 16,
            "pooling_kernel_size": 3,
        },
    }
    encoder = read_vision_encoder(config, {}, 2816)
    assert encoder is not None
    videos = profile_encoder(encoder, replace(SETTINGS, max_num_batched_tokens=16384), 2)
    images = profile_encoder(encoder, replace(SETTINGS, limit_mm_per_prompt='{"video": 0}'), 2)

    assert videos is not None
    assert images is not None
    assert (videos.items, videos.tokens_per_item) == (
        6,
        2496,
    )  # the six videos of a published start
    assert (images.items, images.tokens_per_item) == (8192 // 280, 280)
