"""The vision encoder of a model that cuts each image into a fixed number of tiles and attends across to them (Llama 3.2 Vision).

Source: vllm/model_executor/models/mllama.py, 0.6 to 0.10; later versions do not run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomguard.memory.model.encoder import Encoder
from oomguard.memory.model.shape import is_count

_NUMBERS: Final = ("hidden_size", "intermediate_size", "image_size", "patch_size", "max_num_tiles")
_MLP_TENSORS: Final = 2


def read_tiled_encoder(config: Mapping[str, Any], vision: Mapping[str, Any], output_width: int) -> Encoder | None:
    """Read the encoder; None where the model is of another family, or where a number is missing.

    Args:
        config: the model's whole configuration.
        vision: its part of the vision encoder.
        output_width: the language model's hidden size.
    """
    if config.get("model_type") != "mllama":
        return None
    counts = [n for name in _NUMBERS if is_count(n := vision.get(name)) and n > 0]
    kept = vision.get("intermediate_layers_indices")
    if len(counts) != len(_NUMBERS) or not isinstance(kept, list):
        return None
    width, mlp, side, patch, tiles = counts
    patches = (side // patch) ** 2 + 1  # with the class
    return Encoder(
        width,
        mlp,
        _MLP_TENSORS,
        1,
        tiles * patches,
        output_width,
        in_prompt=False,
        tiles=tiles,
        kept_layers=len(kept),
    )
