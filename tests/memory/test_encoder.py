"""What the encoder of images takes while vLLM profiles it: read from the configuration, and held against published starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from oomguard.errors import SettingError
from oomguard.facts import GIB
from oomguard.memory.encoder import profile, read_encoder
from oomguard.memory.fitting import fit
from oomguard.memory.model_files import ModelFiles
from oomguard.memory.plan import plan_vllm
from oomguard.memory.prepared import prepare
from oomguard.memory_plan import VllmSettings

SETTINGS = VllmSettings(
    version=Version("0.19"), gpu_total_bytes=80 * GIB, gpu_memory_utilization=0.9, max_num_seqs=256, max_num_batched_tokens=8192,
)  # fmt: skip
QWEN25 = {
    "model_type": "qwen2_5_vl", "video_token_id": 151656,
    "vision_config": {"hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2, "hidden_act": "silu"},
}  # fmt: skip
QWEN2 = {
    **QWEN25,
    "vision_config": {
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "hidden_size": 3584,
    },
}
GEMMA3 = {
    "mm_tokens_per_image": 256,
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 896, "hidden_act": "gelu_pytorch_tanh"},
}  # fmt: skip
LLAVA_NEXT = {
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 336, "hidden_act": "quick_gelu"},
}  # fmt: skip
INTERN = {
    "downsample_ratio": 0.5, "max_dynamic_patch": 12,
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 448, "hidden_act": "gelu"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("outer", "tokens", "patches", "tensors", "width"),
    [
        (QWEN25, 16384, 4, 3, 1280), (QWEN2, 16384, 4, 3, 1280), (GEMMA3, 256, 16, 2, 1152), (LLAVA_NEXT, 5 * 576, 1, 3, 1024),
        (INTERN, 13 * 256, 4, 2, 1024),
    ],
    ids=["qwen2.5-vl", "qwen2-vl", "gemma 3", "llava-next", "internvl"],
)  # fmt: skip
def test_a_tower_is_read_from_its_family_s_fields(outer, tokens, patches, tensors, width):
    found = read_encoder(outer, {}, 2048)
    assert found is not None
    assert (found.tokens_per_image, found.patches_per_token, found.mlp_tensors, found.width) == (
        tokens,
        patches,
        tensors,
        width,
    )


def test_the_processor_says_how_large_an_image_can_be():
    assert read_encoder(QWEN25, {"max_pixels": 28 * 28 * 1280}, 2048).tokens_per_image == 1280
    assert read_encoder(QWEN25, {"size": {"longest_edge": 28 * 28 * 900}}, 2048).tokens_per_image == 900


@pytest.mark.parametrize(
    "vision", [None, 3, {}, {"hidden_size": 0, "patch_size": 14}, {"hidden_size": 1280, "patch_size": "14"}]
)
def test_a_tower_whose_numbers_are_not_given_is_none(vision):
    assert read_encoder({"vision_config": vision}, {}, 2048) is None


def test_a_published_start_of_qwen2_5_vl_3b_is_met():
    """4.06 GiB with two images of 16384 tokens: 32768 tokens in one step of vLLM 0.7 to 0.9, two images of the largest size."""
    found = profile(read_encoder(QWEN25, {}, 2048), replace(SETTINGS, max_num_batched_tokens=32768), 2)
    assert (found.images, found.tokens_per_image) == (2, 16384)
    assert found.peak_bytes / GIB == pytest.approx(4.06, rel=0.05)


def test_an_image_larger_than_a_step_is_profiled_all_the_same():
    assert profile(read_encoder(QWEN25, {}, 2048), SETTINGS, 2).images == 1


@pytest.mark.parametrize(
    ("limits", "images"),
    [
        (None, 32),
        ('{"image": 4}', 32),
        ('{"image": 1, "video": 0}', 2),
        ("image=1,video=0", 2),
        ('{"image": {"count": 1}, "video": 0}', 2),
    ],
)
def test_the_limit_of_a_prompt_bounds_the_images_of_a_step(limits, images):
    encoder = read_encoder({**GEMMA3, "video_token_id": 1}, {}, 2560)
    assert profile(encoder, replace(SETTINGS, max_num_seqs=2, limit_mm_per_prompt=limits), 2).images == images


def test_no_images_are_no_profile():
    assert profile(read_encoder(GEMMA3, {}, 2560), replace(SETTINGS, limit_mm_per_prompt='{"image": 0}'), 2) is None


@pytest.mark.parametrize(
    "limits", ["{", "image", '{"image": "many"}', '{"image": -1}', "[1]", '{"image": 1e400}', '{"a":' * 3000]
)
def test_a_limit_that_is_none_is_refused(limits):
    with pytest.raises(SettingError, match="limit_mm_per_prompt"):
        profile(read_encoder(GEMMA3, {}, 2560), replace(SETTINGS, limit_mm_per_prompt=limits), 2)


TEXT = {
    "model_type": "qwen2", "num_hidden_layers": 36, "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "torch_dtype": "bfloat16", "max_position_embeddings": 128000,
}  # fmt: skip


@pytest.mark.parametrize("config", [{**QWEN25, "text_config": TEXT}, {**TEXT, **QWEN25}], ids=["in parts", "flat"])
def test_a_plan_says_what_the_images_take_and_is_smaller_without_them(config):
    model = prepare(ModelFiles("vl", "config.json", config, ()))
    asked = replace(SETTINGS, max_model_len=8192, max_num_seqs=16)
    found = plan_vllm(model, asked)
    none = plan_vllm(model, replace(asked, limit_mm_per_prompt='{"image": 0, "video": 0}'))
    assert any(line.startswith("images: profiled with 1 of 16384 tokens each, ") for line in found.assumptions)
    assert not any(line.startswith("images") for line in none.assumptions)
    assert found.kv_cache_pool_bytes < none.kv_cache_pool_bytes
    assert found.uncertainty_bytes > none.uncertainty_bytes


def test_where_only_the_images_are_too_much_it_is_said_and_acted_on_by_the_user():
    model = prepare(ModelFiles("vl", "config.json", {**QWEN25, "text_config": TEXT}, None))
    small = replace(
        SETTINGS, gpu_total_bytes=10 * GIB, max_model_len=1024, max_num_seqs=None, max_num_batched_tokens=None
    )
    found = fit(model, small)
    assert (found.plan, found.without_images) == (None, True)
    without = replace(small, limit_mm_per_prompt='{"image": 0, "video": 0}')
    assert fit(model, without).plan is not None


def test_sampling_fits_into_what_the_images_were_profiled_with():
    model = prepare(ModelFiles("vl", "config.json", {**QWEN25, "text_config": TEXT}, ()))
    many = replace(
        SETTINGS, version=Version("0.32"), max_num_seqs=1024, max_num_batched_tokens=1024, max_model_len=8192
    )
    assert plan_vllm(model, many).stages[0].unprofiled_bytes == 0
    without = plan_vllm(model, replace(many, limit_mm_per_prompt='{"image": 0, "video": 0}'))
    assert without.stages[0].unprofiled_bytes > 0
