"""Read a model's vision encoder: its widths, and the patches and tokens of its largest image.

Sources: the fields of published configurations, and vLLM's own code in vllm/model_executor/models
(0.32).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from oomguard.estimate.model.shape import FAMILIES, is_count

# The same record describes an image encoder and an audio encoder.


@dataclass(frozen=True, slots=True)
class Encoder:
    """Describe an encoder: its widths in elements, and the tokens of its largest item.

    Attributes:
        width: elements of a patch between layers.
        mlp_width: elements of a patch inside the MLP.
        mlp_tensors: live tensors of that width: two, or three if the activation is gated or a
            product.
        patches_per_token: patches, or audio frames, per token.
        tokens_per_item: tokens of the largest image or the longest audio.
        output_width: the width of its outputs, equal to the language model's.
        takes_video: whether a prompt may also have videos.
        modality: ``image`` or ``audio``, as in vLLM's ``limit_mm_per_prompt``.
        most_per_prompt: the largest number of items per prompt; None: no limit of the model.
        tokens_per_video: tokens of a video that is larger than any image; None: images are larger.
        patches_per_video: patches of that video.
        in_prompt: whether its tokens are part of the prompt; with cross-attention they are not.
        heads: attention heads, split over ranks if divisible; 0 if the file does not say.
        attention: extra tensors of its attention: ``rotary`` rotates queries and keys in float32,
            ``by_torch`` rotates without a kernel, ``normed`` normalizes the same way; empty: none
            beyond the MLP's.
        patch_elements: elements of one patch's pixels.
        formatted_video_tokens: tokens of the longest video, which some versions count several
            times; 0 for other models.
        framed_videos: whether every two frames of a video may be as large as an image.
        tiles: the fixed number of tiles per image, each with ``patches_per_token`` patches.
        kept_layers: layers whose outputs stay allocated until the end.
        always_profiled: whether early versions profiled its images regardless of the step's tokens.
        pixels_per_token: pixels per token if the processor's limit decides the image size;
            otherwise 0.
        tokens_per_tile: tokens per tile if the processor's limit decides the number of tiles;
            otherwise 0.
    """

    width: int
    mlp_width: int
    mlp_tensors: int
    patches_per_token: float
    tokens_per_item: int
    output_width: int
    takes_video: bool = False
    modality: str = "image"
    most_per_prompt: int | None = None
    in_prompt: bool = True
    tokens_per_video: int | None = None
    patches_per_video: int = 0
    heads: int = 0
    attention: str = ""
    patch_elements: int = 0
    formatted_video_tokens: int = 0
    framed_videos: bool = False
    tiles: int = 0
    kept_layers: int = 0
    always_profiled: bool = False
    pixels_per_token: int = 0
    tokens_per_tile: int = 0


# The vision encoder of Llama 3.2 Vision, which cuts each image into a fixed number of tiles and
# uses cross-attention. Source: vllm/model_executor/models/mllama.py, 0.6 to 0.10; later versions do
# not support it.

_NUMBERS: Final = ("hidden_size", "intermediate_size", "image_size", "patch_size", "max_num_tiles")
_MLP_TENSORS: Final = 2


def read_tiled_encoder(
    config: Mapping[str, Any], vision: Mapping[str, Any], output_width: int
) -> Encoder | None:
    """Read the encoder; None if the model is of another family or a number is missing.

    Args:
        config: the model's whole configuration.
        vision: the configuration of its vision encoder.
        output_width: the language model's hidden size.
    """
    if config.get("model_type") != "mllama":
        return None
    counts = []
    for name in _NUMBERS:
        if is_count(n := vision.get(name)) and n > 0:
            counts.append(n)
    kept = vision.get("intermediate_layers_indices")
    if len(counts) != len(_NUMBERS) or not isinstance(kept, list):
        return None
    width, mlp, side, patch, tiles = counts
    patches = (side // patch) ** 2 + 1  # plus the class token
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


_PLAIN_TENSORS = 2
_PRODUCT_TENSORS = 3
_COLORS: Final = 3
_HEADS: Final = ("num_heads", "num_attention_heads", "attention_heads")
_PRODUCTS: Final = frozenset({"silu", "quick_gelu", "swish"})
# These fields change tiles and pixel shuffling in other families (Llama 4, Idefics). With one of
# them the number of image tokens is unknown.
_NOT_READ: Final = ("pixel_shuffle_ratio", "scale_factor", "max_image_tiles", "max_num_tiles")
# These models turn a text or an image into one vector. The image becomes one class token (clip.py,
# siglip.py).
_DUAL_ENCODERS: Final = frozenset({"clip", "siglip"})


def read_vision_encoder(
    config: Mapping[str, Any], processor: Mapping[str, Any], output_width: int
) -> Encoder | None:
    """Read the vision encoder from the configurations of a model and its image processor.

    Returns None if the model has no vision encoder, or a required number is missing.
    """
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        thinker = config.get("thinker_config")
        if isinstance(thinker, Mapping):
            vision = thinker.get("vision_config")
        else:
            vision = None
    if not isinstance(vision, Mapping):
        return None
    found = read_tiled_encoder(config, vision, output_width) or _read(
        config, vision, processor, output_width
    )
    if found is None:
        return None
    return _with_attention(config, vision, found)


def _with_attention(
    config: Mapping[str, Any], vision: Mapping[str, Any], found: Encoder
) -> Encoder:
    """Add the attention's tensors, the pixels per patch and the stored layers to an encoder."""
    kind = str(config.get("model_type"))
    types = FAMILIES["types"]
    patch = _side(vision, "patch_size") or 0
    frames = _count(vision, "temporal_patch_size") or 1
    normed = vision.get("qk_normalization") is True
    turned = kind.startswith(tuple(types["rotary_encoders"]))
    # All of these accept videos (get_supported_mm_limits in
    # vllm/model_executor/models/qwen2_vl.py), even if the file has no video token.
    found = replace(found, takes_video=found.takes_video or turned)
    inner = vision.get("deepstack_visual_indexes")
    if isinstance(inner, list):
        parts = 1 + len(inner)
    else:
        parts = 1
    heads = 0
    for name in _HEADS:
        heads = heads or _count(vision, name) or 0
    attention = ""
    if normed:
        attention = "normed"
    elif turned:
        attention = "rotary"
    elif kind in types["rotary_by_torch"]:
        attention = "by_torch"
    video_tokens = 0
    if found.takes_video:
        video_tokens = FAMILIES["formatted_videos"].get(kind, 0)
    return replace(
        found,
        heads=heads,
        attention=attention,
        patch_elements=_COLORS * frames * patch**2,
        output_width=parts * found.output_width,
        always_profiled=kind in types["images_always_profiled"],
        framed_videos=kind.startswith(tuple(types["framed_videos"])),
        formatted_video_tokens=video_tokens,
    )


def _read(
    config: Mapping[str, Any],
    vision: Mapping[str, Any],
    processor: Mapping[str, Any],
    output_width: int,
) -> Encoder | None:
    # Qwen2-VL calls the encoder's width embed_dim and its output's width hidden_size.
    width = _count(vision, "embed_dim") or _count(vision, "hidden_size")
    patch = _side(vision, "patch_size")
    ratio = vision.get("mlp_ratio")
    if width and isinstance(ratio, (int, float)) and 0 < ratio < width:
        scaled = round(width * ratio)
    else:
        scaled = None
    mlp = _count(vision, "intermediate_size") or scaled
    shuffled = []
    for part in (config, vision):
        for name in _NOT_READ:
            if part.get(name):
                shuffled.append(name)
    if (
        not width
        or not patch
        or not mlp
        or shuffled
        or (vision.get("image_size") and not _side(vision, "image_size"))
    ):
        return None
    activation = vision.get("hidden_act", "quick_gelu" if "embed_dim" in vision else "gelu")
    if str(activation) in _PRODUCTS:
        tensors = _PRODUCT_TENSORS
    else:
        tensors = _PLAIN_TENSORS
    pooled = FAMILIES["pooled_encoders"].get(str(config.get("model_type")))
    if pooled is not None:
        return _pooled(
            config,
            vision,
            pooled,
            Encoder(width, mlp, tensors, 1, 1, output_width, takes_video=True),
        )
    side = _side(vision, "image_size")
    merge = _count(vision, "spatial_merge_size") or _count(config, "spatial_merge_size") or 1
    merged = merge**2
    per_token = 0
    per_tile = 0
    if side is not None:
        patches = (side // patch) ** 2
        fixed_tokens = _count(config, "mm_tokens_per_image") or _count(config, "image_seq_length")
        tokens = fixed_tokens or _shuffled(config, patches // merged)
        merged = max(1, patches // max(1, tokens))
        most = _count(config, "max_dynamic_patch")
        if most:
            per_tile = tokens
        else:
            per_tile = 0
        tokens *= 1 + (most or _tiles(config))
    else:
        per_token = (patch * merge) ** 2
        largest = largest_pixels(processor)
        known = FAMILIES["largest_images"]
        by_type = known.get(str(config.get("model_type")), known["others"])
        if largest is None:
            tokens = by_type
        else:
            tokens = largest // per_token
    if side is not None and str(config.get("model_type")) in _DUAL_ENCODERS:
        return Encoder(width, mlp, tensors, patches, 1, output_width, most_per_prompt=1)
    return Encoder(
        width,
        mlp,
        tensors,
        merged,
        max(1, tokens),
        output_width,
        "video_token_id" in config,
        pixels_per_token=per_token,
        tokens_per_tile=per_tile,
    )


def _pooled(
    config: Mapping[str, Any], vision: Mapping[str, Any], names: Mapping[str, Any], plain: Encoder
) -> Encoder | None:
    """Return an encoder that pools its patches to a fixed number of tokens.

    It includes the video that vLLM profiles it with.
    """
    tokens = _count(config, names["tokens"])
    pool = _count(vision, names["pool"])
    if tokens is None or pool is None:
        return None
    frames = names["frames"]
    each = names["tokens_per_frame"]
    return replace(
        plain,
        mlp_tensors=names["mlp_tensors"],
        patches_per_token=pool**2,
        tokens_per_item=tokens,
        tokens_per_video=frames * (each + names["around_a_frame"]),
        patches_per_video=frames * each * pool**2,
    )


def largest_pixels(processor: Mapping[str, Any]) -> int | None:
    """Return the pixels of the processor's largest image, or None if the file does not say."""
    size = processor.get("size")
    if isinstance(size, Mapping):
        longest = _count(size, "max_pixels") or _count(size, "longest_edge")
    else:
        longest = None
    return _count(processor, "max_pixels") or longest


def _shuffled(config: Mapping[str, Any], tokens: int) -> int:
    """Return the tokens after a pixel shuffle (InternVL).

    The shuffle multiplies each side by ``downsample_ratio``.
    """
    ratio = config.get("downsample_ratio")
    if isinstance(ratio, float) and 0 < ratio < 1:
        return round(tokens * ratio * ratio)
    return tokens


def _tiles(config: Mapping[str, Any]) -> int:
    """Return the tiles of the largest grid, without the whole image (LLaVA-NeXT).

    Returns 0 if the model does not split images.
    """
    pinpoints = config.get("image_grid_pinpoints")
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        side = _side(vision, "image_size")
    else:
        side = None
    if not isinstance(pinpoints, list) or not side:
        return 0
    grids = []
    for p in pinpoints:
        if isinstance(p, list) and len(p) == 2 and all(map(is_count, p)):
            grids.append(p)
    return max((max(1, high // side) * max(1, wide // side) for high, wide in grids), default=0)


def _side(part: Mapping[str, Any], name: str) -> int | None:
    """Return a length in pixels, given as one number or as a pair of equal numbers."""
    value = part.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return _count({name: value[0]}, name)
    return _count(part, name)


def _count(part: Mapping[str, Any], name: str) -> int | None:
    value = part.get(name)
    if is_count(value) and value > 0:
        return value
    return None
