"""What of a model's configuration says how its vision encoder turns images into tokens."""

from __future__ import annotations

from oomguard.estimate.model.vision_encoder import read_vision_encoder

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
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 896,
        "hidden_act": "gelu_pytorch_tanh",
    },
}
LLAVA_NEXT = {
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 336,
        "hidden_act": "quick_gelu",
    },
}
INTERN = {
    "downsample_ratio": 0.5,
    "max_dynamic_patch": 12,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 448,
        "hidden_act": "gelu",
    },
}
SIGLIP = {
    "model_type": "siglip",
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 16,
        "image_size": 224,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def test_an_encoder_is_read_from_its_family_s_fields(subtests):
    for name, config, tokens, patches, tensors, width in [
        ("qwen2.5-vl", QWEN25, 16384, 4, 3, 1280),
        ("qwen2-vl", QWEN2, 16384, 4, 3, 1280),
        ("gemma 3", GEMMA3, 256, 16, 2, 1152),
        ("llava-next", LLAVA_NEXT, 5 * 576, 1, 3, 1024),
        ("internvl", INTERN, 13 * 256, 4, 2, 1024),
        ("siglip", SIGLIP, 1, 196, 2, 768),
    ]:
        with subtests.test(name):
            found = read_vision_encoder(config, {}, 2048)
            assert found is not None
            assert (
                found.tokens_per_item,
                found.patches_per_token,
                found.mlp_tensors,
                found.width,
            ) == (
                tokens,
                patches,
                tensors,
                width,
            )


def test_video_family_accepts_videos_without_their_token():
    plain = {name: value for name, value in QWEN25.items() if name != "video_token_id"}
    assert read_vision_encoder(plain, {}, 2048).takes_video
    assert not read_vision_encoder(GEMMA3, {}, 2048).takes_video


def test_the_processor_says_how_large_an_image_can_be():
    assert read_vision_encoder(QWEN25, {"max_pixels": 28 * 28 * 1280}, 2048).tokens_per_item == 1280
    assert (
        read_vision_encoder(QWEN25, {"size": {"longest_edge": 28 * 28 * 900}}, 2048).tokens_per_item
        == 900
    )


def test_an_encoder_whose_numbers_are_not_given_is_none(subtests):
    for vision in [
        None,
        3,
        {},
        {"hidden_size": 0, "patch_size": 14},
        {"hidden_size": 1280, "patch_size": "14"},
    ]:
        with subtests.test(vision=vision):
            assert read_vision_encoder({"vision_config": vision}, {}, 2048) is None
