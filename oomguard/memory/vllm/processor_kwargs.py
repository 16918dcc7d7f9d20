"""An encoder under ``mm_processor_kwargs``: how large the user lets the processor make an image, or into how many tiles it is cut.

Source: get_image_size_with_most_features of vllm/model_executor/models/qwen2_vl.py (``max_pixels``, else ``size``), get_max_image_tokens of
internvl.py (``max_dynamic_patch``). Other arguments, those of videos among them, are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.memory.model.encoder import Encoder
from oomguard.memory.model.model import Model
from oomguard.memory.model.shape import is_count
from oomguard.memory.model.vision_encoder import largest_pixels
from oomguard.memory.vllm.start import VllmSettings

_OF_IMAGES: Final = "images_kwargs"  # the processors of transformers take them under this name too


def encoder_of(model: Model, settings: VllmSettings) -> Encoder | None:
    """Return a model's encoder as a start has its images prepared, None without one; raises SettingError as ``processed`` does."""
    return None if model.encoder is None else processed(model.encoder, settings.mm_processor_kwargs)


def processed(encoder: Encoder, given: str | None) -> Encoder:
    """Return an encoder whose largest image is the one that these arguments permit.

    Raises:
        SettingError: they are no JSON object.
    """
    arguments = _read(given)
    pixels, tiles = largest_pixels(arguments), arguments.get("max_dynamic_patch")
    tokens = encoder.tokens_per_item
    if pixels and encoder.pixels_per_token:
        tokens = pixels // encoder.pixels_per_token
    elif is_count(tiles) and tiles > 0 and encoder.tokens_per_tile:
        tokens = (1 + tiles) * encoder.tokens_per_tile  # the whole image is one more
    return replace(encoder, tokens_per_item=max(1, tokens))


def _read(given: str | None) -> Mapping[str, Any]:
    if given is None:
        return {}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingError(f"mm_processor_kwargs is {given!r}", hint='for example {"max_pixels": 1003520}')
    nested = found.get(_OF_IMAGES)
    return {**found, **nested} if isinstance(nested, dict) else found
