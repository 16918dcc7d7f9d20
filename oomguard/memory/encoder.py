"""What an encoder of images takes while vLLM profiles it: as many images as a step's tokens allow, all at once.

Per patch ``4.6 * H + k * I`` elements with H the tower's width, I its MLP's and k the tensors of that width that live at once: 2,
or 3 where the activation is gated or a product. Counted by running vLLM 0.32's own towers of CLIP (4.85), SigLIP (4.55) and
Qwen2-VL (4.33) on the CPU with two layers; vllm/multimodal/encoder_budget.py says how many images. Audio and video are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from oomguard.errors import SettingError
from oomguard.facts import format_gib
from oomguard.memory.model_shape import is_count
from oomguard.memory_plan import VllmSettings

_ELEMENTS_OF_WIDTH: Final = 4.6
_PLAIN, _PRODUCT = 2, 3
_PRODUCTS: Final = frozenset({"silu", "quick_gelu", "swish"})
NO_IMAGES: Final = '{"image": 0, "video": 0}'
_MOST_PER_PROMPT: Final = 999  # vLLM's own where the user names none
_UNCERTAINTY_RATIO: Final = 0.3
# Tiles and shuffles of other families (Llama 4, Idefics): with one of these the tokens of an image are not known here.
_NOT_READ: Final = ("pixel_shuffle_ratio", "scale_factor", "max_image_tiles", "max_num_tiles")
# The largest image of Qwen's processors where no file says another: 12845056 pixels of 28 x 28 a token, 16777216 of 32 x 32
# (preprocessor_config.json of the published models).
_LARGEST_TOKENS: Final = 16_384


@dataclass(frozen=True, slots=True)
class Encoder:
    """One tower: its widths in elements, the tokens that its largest image becomes, and the patches behind each token."""

    width: int
    mlp_width: int
    mlp_tensors: int
    patches_per_token: int
    tokens_per_image: int
    output_width: int
    takes_video: bool


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """Bytes at the tower's peak, and of its outputs, which stay while the language model is profiled."""

    images: int
    tokens_per_image: int
    peak_bytes: int
    outputs_bytes: int

    def __str__(self) -> str:
        """How they are profiled, as a plan says it."""
        return f"profiled with {self.images} of {self.tokens_per_image} tokens each, {format_gib(self.peak_bytes)} at the peak"

    @property
    def uncertainty_bytes(self) -> int:
        """To either side: kernels differ by platform, and towers by more than their widths."""
        return round(_UNCERTAINTY_RATIO * self.peak_bytes)


def read_encoder(outer: Mapping[str, Any], processor: Mapping[str, Any], output_width: int) -> Encoder | None:
    """The tower of images of a configuration, None where there is none or its numbers are not given."""
    vision = outer.get("vision_config")
    if not isinstance(vision, Mapping):
        thinker = outer.get("thinker_config")
        vision = thinker.get("vision_config") if isinstance(thinker, Mapping) else None
    if not isinstance(vision, Mapping):
        return None
    # Qwen2-VL calls the tower's width embed_dim, and its output's hidden_size.
    width = _count(vision, "embed_dim") or _count(vision, "hidden_size")
    patch = _side(vision, "patch_size")
    ratio = vision.get("mlp_ratio")
    scaled = round(width * ratio) if width and isinstance(ratio, (int, float)) and 0 < ratio < width else None
    mlp = _count(vision, "intermediate_size") or scaled
    shuffled = [name for part in (outer, vision) for name in _NOT_READ if part.get(name)]
    if not width or not patch or not mlp or shuffled or (vision.get("image_size") and not _side(vision, "image_size")):
        return None
    activation = vision.get("hidden_act", "quick_gelu" if "embed_dim" in vision else "gelu")
    side = _side(vision, "image_size")
    merge = _count(vision, "spatial_merge_size") or _count(outer, "spatial_merge_size") or 1
    merged = merge**2
    if side is not None:
        patches = (side // patch) ** 2
        told = _count(outer, "mm_tokens_per_image") or _count(outer, "image_seq_length")
        tokens = told or _shuffled(outer, patches // merged)
        merged = max(1, patches // max(1, tokens))
        tokens *= 1 + (_count(outer, "max_dynamic_patch") or _tiles(outer))
    else:
        largest = _largest_pixels(processor)
        tokens = _LARGEST_TOKENS if largest is None else largest // (patch * merge) ** 2
    tensors = _PRODUCT if str(activation) in _PRODUCTS else _PLAIN
    return Encoder(width, mlp, tensors, merged, max(1, tokens), output_width, "video_token_id" in outer)


def profile(encoder: Encoder, settings: VllmSettings, element_bytes: int) -> EncoderProfile | None:
    """What one rank takes under settings with all defaults filled in; None where prompts may have no images."""
    per_prompt = images_per_prompt(settings.limit_mm_per_prompt, encoder)
    if per_prompt == 0:
        return None
    each = encoder.tokens_per_image
    budget = max(settings.max_num_batched_tokens or 0, each)
    images = max(1, min(budget // each, (settings.max_num_seqs or 1) * per_prompt))
    mlp = -(-encoder.mlp_width // settings.tensor_parallel_size)
    elements = _ELEMENTS_OF_WIDTH * encoder.width + encoder.mlp_tensors * mlp
    outputs = images * each * encoder.output_width * element_bytes
    peak = round(images * each * encoder.patches_per_token * elements * element_bytes) + outputs
    return EncoderProfile(images, each, peak, outputs)


def images_per_prompt(limits: str | None, encoder: Encoder) -> int:
    """The most images, or videos, of a prompt under ``--limit-mm-per-prompt``; raises SettingError where that is no such limit."""
    if limits is None:
        return _MOST_PER_PROMPT
    try:
        given = json.loads(limits) if limits.lstrip().startswith("{") else dict(p.split("=") for p in limits.split(","))
        counts = {name: int(_limit(value)) for name, value in given.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise SettingError(f"limit_mm_per_prompt is {limits!r}", hint='for example {"image": 1, "video": 0}') from None
    if any(value < 0 for value in counts.values()):
        raise SettingError(f"limit_mm_per_prompt is {limits!r}, with a count below 0")
    videos = counts.get("video", _MOST_PER_PROMPT) if encoder.takes_video else 0
    return max(counts.get("image", _MOST_PER_PROMPT), videos)


def _limit(value: Any) -> Any:
    """A count, or the newer form that has sizes beside it."""
    return value.get("count", _MOST_PER_PROMPT) if isinstance(value, Mapping) else value


def _largest_pixels(processor: Mapping[str, Any]) -> int | None:
    """Pixels of the largest image that the processor makes, None where it does not say."""
    size = processor.get("size")
    longest = _count(size, "max_pixels") or _count(size, "longest_edge") if isinstance(size, Mapping) else None
    return _count(processor, "max_pixels") or longest


def _shuffled(outer: Mapping[str, Any], tokens: int) -> int:
    """Tokens after a pixel shuffle (InternVL): ``downsample_ratio`` of them along each side."""
    ratio = outer.get("downsample_ratio")
    return round(tokens * ratio * ratio) if isinstance(ratio, float) and 0 < ratio < 1 else tokens


def _tiles(outer: Mapping[str, Any]) -> int:
    """Tiles beside the whole image of the largest grid (LLaVA-NeXT), 0 where images are not cut."""
    pinpoints, vision = outer.get("image_grid_pinpoints"), outer.get("vision_config")
    side = _side(vision, "image_size") if isinstance(vision, Mapping) else None
    if not isinstance(pinpoints, list) or not side:
        return 0
    grids = [p for p in pinpoints if isinstance(p, list) and len(p) == 2 and all(isinstance(n, int) for n in p)]
    return max((max(1, high // side) * max(1, wide // side) for high, wide in grids), default=0)


def _side(part: Mapping[str, Any], name: str) -> int | None:
    """A length in pixels; of a pair of equal ones either."""
    value = part.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return _count({name: value[0]}, name)
    return _count(part, name)


def _count(part: Mapping[str, Any], name: str) -> int | None:
    value = part.get(name)
    return value if is_count(value) and value > 0 else None
