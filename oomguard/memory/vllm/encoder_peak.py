"""What each patch takes at the peak of an encoder that vLLM profiles: in its MLP, or in attention where that makes more.

The MLP: ``4.6 * W + k * I`` elements a patch, with W the encoder's width, I its MLP's and k the tensors of that width that live at
once. Counted by running vLLM 0.32's own encoders of CLIP (4.85), SigLIP (4.55) and Qwen2-VL (4.33) on the CPU with two layers.
Attention, and what came with single versions, were counted in the sources that constants.toml names. Rotary encoders take more tensors of
that width in some versions, for which no reading of the sources gives a reason: fitted.toml has how many, by published starts.
"""

from __future__ import annotations

from typing import Any, Final

from oomguard.memory.constants import constant
from oomguard.memory.model.encoder import Encoder
from oomguard.memory.vllm.start import VllmSettings

_ELEMENTS_OF_WIDTH: Final = 4.6
# What a block holds all the while: its input, and that normed.
_HELD_WIDTHS: Final = 2
# Queries, keys and values; of one of them a copy in float32, its square or product, and two in half precision
# (RMSNorm.forward_native in vllm/model_executor/layers/layernorm.py, 0.6.6).
_NORMED_WIDTHS: Final = 9
# Queries, keys and values, each of them apart, queries and keys joined; of those in float32 a copy, its product with the cosines, its
# turned halves and their product with the sines (DotsVisionAttention in vllm/model_executor/models/dots_ocr.py, 0.12).
_TORCH_WIDTHS: Final = 3 + 3 + 2 + 4 * 4
# Until the first engine went pixels came in float32, with a copy in half precision.
_PIXEL_COPIES: Final = 3
# Of tiles: the outputs that are kept, once more when they are stacked; the embeddings of the patches and the first transformer's output,
# which variables hold to the end; the second one's input, its block's residual and that normed.
_STACKED, _BLOCK_WIDTHS = 2, 5
_ROUND_PATCHES: Final = 8


def peak_elements(encoder: Encoder, settings: VllmSettings) -> float:
    """Return the elements that one patch takes at the peak of one rank.

    Args:
        encoder: the encoder by the model's configuration.
        settings: vLLM's settings with all defaults filled in.
    """
    rule = constant("encoder_profile", settings.version)
    mlp = -(-encoder.mlp_width // settings.tensor_parallel_size)
    tensors = encoder.mlp_tensors
    if encoder.attention == "rotary":
        tensors += constant("encoder_mlp", settings.version)["tensors_more"]
    return max(_ELEMENTS_OF_WIDTH * encoder.width + tensors * mlp, _attention(encoder, settings, rule))


def _attention(encoder: Encoder, settings: VllmSettings, rule: dict[str, Any]) -> float:
    """Return what attention makes of a patch on one rank; 0 for the encoders whose attention makes less than their MLP."""
    ranks, width = settings.tensor_parallel_size, encoder.width
    shared = ranks if encoder.heads and encoder.heads % ranks == 0 else 1
    if encoder.attention == "normed":
        return (_HELD_WIDTHS + _NORMED_WIDTHS / shared) * width + _PIXEL_COPIES * encoder.patch_elements
    if encoder.attention == "by_torch":
        return (_HELD_WIDTHS + _TORCH_WIDTHS / shared) * width + encoder.patch_elements
    if encoder.attention != "rotary" or not rule.get("rotary_widths"):
        return 0.0
    own = rule["rotary_widths"] / shared
    gathered = rule["gathered_widths"] + 3 / shared if ranks > 1 else 0
    return float((_HELD_WIDTHS + max(own, gathered)) * width + encoder.patch_elements)


def tiles_peak_bytes(encoder: Encoder, items: int, settings: VllmSettings, element_bytes: int) -> int:
    """Return the peak of images in tiles: the mask between all patches of an image, and what its inner layers keep.

    Source: MllamaVisionModel.forward in vllm/model_executor/models/mllama.py, 0.7.
    """
    patches = encoder.tokens_per_item // encoder.tiles
    padded = encoder.tiles * (-(-patches // _ROUND_PATCHES) * _ROUND_PATCHES)
    mlp = -(-encoder.mlp_width // settings.tensor_parallel_size)
    widths = (_STACKED * encoder.kept_layers + _BLOCK_WIDTHS) * encoder.width + encoder.mlp_tensors * mlp
    each = padded**2 + padded * (widths + _PIXEL_COPIES * encoder.patch_elements)
    return items * each * element_bytes
