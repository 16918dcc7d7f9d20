"""How many tokens stand for each image of a call that tells the images' own heights and widths, as its model counts them."""

from __future__ import annotations

import sys
from typing import Any

from oomguard.engines.transformers.tensors import of_host


def tokens_by_size(model: Any, sizes: Any) -> list[int] | None:
    """Return the tokens of each image; None of a model that counts them otherwise.

    Args:
        model: the model.
        sizes: height and width of each image, a tensor of two columns.
    """
    if sizes.ndim != 2 or sizes.shape[1] != 2:
        return None
    inner = getattr(model, "model", model)
    vision: Any = getattr(getattr(model, "config", None), "vision_config", None)
    pairs = [(int(height), int(width)) for height, width in sizes.tolist()]
    if hasattr(inner, "pack_image_features"):
        return of_host(_packed, inner, vision, pairs)
    if getattr(vision, "model_type", None) == "pixtral":
        side = vision.patch_size * getattr(model.config, "spatial_merge_size", 1)
        return [(height // side) * (width // side) for height, width in pairs]
    return None


def _packed(inner: Any, vision: Any, pairs: list[tuple[int, int]]) -> list[int] | None:
    """Let the model's own code put together tiles of one number a patch, without what pads the image, and count what it gives."""
    import torch

    tiles = getattr(sys.modules[type(inner).__module__], "image_size_to_num_patches", None)
    if tiles is None or not isinstance(getattr(vision, "image_size", None), int):
        return None
    config, patches = inner.config, (vision.image_size // vision.patch_size) ** 2
    counts = [tiles(pair, config.image_grid_pinpoints, vision.image_size) for pair in pairs]
    try:
        _, lengths = inner.pack_image_features(
            [torch.zeros(count, patches, 1) for count in counts],
            torch.tensor(pairs),
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            image_newline=torch.zeros(1),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):  # another version's, or tiles that it cuts otherwise
        return None
    return [int(length) for length in lengths]
