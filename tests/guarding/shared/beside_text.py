"""Calls of tiny models with images, videos and sounds beside text, as their processors make them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from oomguard.engines.transformers.inputs import tokens_by_size  # noqa: E402

VOCAB, MEDIA = 64, 9
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GREEDY = {"do_sample": False, "max_new_tokens": 4}


def model_of(name, **config):
    torch.manual_seed(0)
    made = getattr(transformers, name.split("For")[0].removesuffix("Model") + "Config")(**config)
    return getattr(transformers, name)(made).eval()


def noise(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(rows, tokens, seed=2):
    return torch.randint(20, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def with_tokens(counts, token=MEDIA, before=()):
    """Rows of text around so many tokens each, padded on the left."""
    text = words(len(counts), 8)
    rows = [
        torch.cat([text[i, :4], torch.tensor([*before, *[token] * n]), text[i, 4:]]).long()
        for i, n in enumerate(counts)
    ]
    longest = max(map(len, rows))
    padded = [torch.cat([torch.zeros(longest - len(row), dtype=torch.long), row]) for row in rows]
    return {"input_ids": torch.stack(padded), "attention_mask": (torch.stack(padded) > 0).long()}


def idefics3():
    vision = {**SEES, "image_size": 64, "patch_size": 8}
    text = {**TEXT, "model_type": "llama"}
    model = model_of(
        "Idefics3ForConditionalGeneration",
        text_config=text,
        vision_config=vision,
        scale_factor=4,
        image_token_id=MEDIA,
    )
    pixels, seen = noise(16, 2, 3, 64, 64), torch.ones(16, 2, 64, 64, dtype=torch.bool)
    pixels[::3, 1], seen[::3, 1] = 0, False  # every third row has one image
    given = {
        **with_tokens([4 if row % 3 == 0 else 8 for row in range(16)]),
        "pixel_values": pixels,
        "pixel_attention_mask": seen,
    }
    return model, lambda: model.generate(**given, **GREEDY)


def llava_onevision():
    vision = {
        **SEES,
        "model_type": "siglip_vision_model",
        "image_size": 56,
        "patch_size": 14,
        "vision_use_head": False,
    }
    config = {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": vision,
        "image_token_index": MEDIA,
    }
    config |= {
        "image_grid_pinpoints": [[56, 56], [56, 112]],
        "vision_feature_layer": -1,
        "video_token_index": 8,
    }
    model = model_of("LlavaOnevisionForConditionalGeneration", **config)
    numbers = [2, 3] * 6  # of several images each is one patch, and a line's end
    pixels = noise(sum(numbers), 1, 3, 56, 56)
    given = {
        **with_tokens([17 * n for n in numbers]),
        "pixel_values": pixels,
        "batch_num_images": torch.tensor(numbers),
    }
    given["image_sizes"] = torch.tensor([(56, 56)] * sum(numbers))
    return model, lambda: model.generate(**given, **GREEDY)


def llava_next():
    """Images of several sizes, of which each takes tokens by its own."""
    vision = {**SEES, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8}
    config = {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": vision,
        "image_token_index": MEDIA,
    }
    config |= {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]], "vision_feature_layer": -1}
    model = model_of("LlavaNextForConditionalGeneration", **config)
    sizes = torch.tensor([(64, 64), (40, 100), (120, 40)] * 4)
    each = tokens_by_size(model, sizes)
    given = {
        **with_tokens([sum(each[:2]), *each[2:]]),
        "pixel_values": noise(12, 5, 3, 32, 32),
        "image_sizes": sizes,
    }
    return model, lambda: model.generate(**given, **GREEDY)


def qwen_video():
    """A plain call, whose result holds what was made of the videos."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
    vision |= {
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [],
    }
    tokens = {
        "image_token_id": MEDIA,
        "video_token_id": 8,
        "vision_start_token_id": 7,
        "vision_end_token_id": 6,
    }
    text = {**TEXT, "rope_parameters": rope}
    model = model_of(
        "Qwen2_5_VLForConditionalGeneration", text_config=text, vision_config=vision, **tokens
    )
    grids = [(1 + row % 2, 8, 4 + 4 * (row % 3)) for row in range(12)]
    given = with_tokens([t * h * w // 4 for t, h, w in grids], token=8, before=[7])
    given |= {
        "pixel_values_videos": noise(sum(t * h * w for t, h, w in grids), 96),
        "video_grid_thw": torch.tensor(grids),
    }
    given |= {"second_per_grid_ts": torch.tensor([1.0 + row % 2 for row in range(12)])}
    given["mm_token_type_ids"] = (given["input_ids"] == 8).int() * 2

    def call():
        with torch.no_grad():
            return model(**given, use_cache=False)

    return model, call


CALLS = {made.__name__: made for made in (llava_next, qwen_video)}
