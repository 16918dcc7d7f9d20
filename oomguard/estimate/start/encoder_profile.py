"""Compute the memory of an image or audio encoder while vLLM profiles it.

vLLM profiles as many images at once as a step's tokens allow: vllm/multimodal/encoder_budget.py.
For Whisper it profiles audio. The estimate excludes other audio and video.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from packaging.version import Version

from oomguard.core.errors import SettingError
from oomguard.core.facts import format_gib
from oomguard.estimate.constants import constant, since
from oomguard.estimate.model.model import Model
from oomguard.estimate.model.shape import is_count
from oomguard.estimate.model.vision_encoder import Encoder, largest_pixels
from oomguard.estimate.start.start import VllmSettings

# The elements per patch at an encoder's peak: in its MLP, or in attention if that is larger.
#
# The MLP has ``4.6 * W + k * I`` elements per patch. W is the encoder's width, I its MLP's, and k
# the number of live tensors of that width. Measured with vLLM 0.32's encoders of CLIP (4.85),
# SigLIP (4.55) and Qwen2-VL (4.33) on the CPU with two layers. Attention and single versions come
# from the sources in constants.toml. In some versions rotary encoders have more such tensors, for a
# reason that the sources do not show; fitted.toml has their number from published starts.

_ELEMENTS_OF_WIDTH: Final = 4.6
# A block always holds its input and the normalized input.
_HELD_WIDTHS: Final = 2
# Queries, keys and values; for one of them a float32 copy, its square or product, and two in half
# precision (RMSNorm.forward_native in vllm/model_executor/layers/layernorm.py, 0.6.6).
_NORMED_WIDTHS: Final = 9
# Queries, keys and values, each separately, and queries and keys concatenated. In float32 a copy,
# its product with the cosines, its rotated halves and their product with the sines
# (DotsVisionAttention in vllm/model_executor/models/dots_ocr.py, 0.12).
_TORCH_WIDTHS: Final = 3 + 3 + 2 + 4 * 4
# The first engine passed pixels in float32, with a copy in half precision.
_PIXEL_COPIES: Final = 3
# For tiles: the stored outputs and their stack; the embeddings of the patches and the first
# transformer's output, which variables hold to the end; the second one's input, its block's
# residual and the normalized input.
_STACKED = 2
_BLOCK_WIDTHS = 5
_ROUND_PATCHES: Final = 8


def peak_elements(encoder: Encoder, settings: VllmSettings) -> float:
    """Return the elements per patch at the peak of one rank.

    Args:
        encoder: the encoder from the model's configuration.
        settings: vLLM's settings with all defaults filled in.
    """
    rule = constant("encoder_profile", settings.version)
    mlp = -(-encoder.mlp_width // settings.tensor_parallel_size)
    tensors = encoder.mlp_tensors
    if encoder.attention == "rotary":
        tensors += constant("encoder_mlp", settings.version)["tensors_more"]
    return max(
        _ELEMENTS_OF_WIDTH * encoder.width + tensors * mlp, _attention(encoder, settings, rule)
    )


def _attention(encoder: Encoder, settings: VllmSettings, rule: dict[str, Any]) -> float:
    """Return attention's elements per patch on one rank, or 0 if the MLP needs more."""
    ranks = settings.tensor_parallel_size
    width = encoder.width
    if encoder.heads and encoder.heads % ranks == 0:
        shared = ranks
    else:
        shared = 1
    if encoder.attention == "normed":
        return (
            _HELD_WIDTHS + _NORMED_WIDTHS / shared
        ) * width + _PIXEL_COPIES * encoder.patch_elements
    if encoder.attention == "by_torch":
        return (_HELD_WIDTHS + _TORCH_WIDTHS / shared) * width + encoder.patch_elements
    if encoder.attention != "rotary" or not rule.get("rotary_widths"):
        return 0.0
    own = rule["rotary_widths"] / shared
    if ranks > 1:
        gathered = rule["gathered_widths"] + 3 / shared
    else:
        gathered = 0
    return float((_HELD_WIDTHS + max(own, gathered)) * width + encoder.patch_elements)


def tiles_peak_bytes(
    encoder: Encoder, items: int, settings: VllmSettings, element_bytes: int
) -> int:
    """Return the peak of images in tiles.

    It includes the mask between all patches of an image and the stored outputs of inner layers.
    Source: MllamaVisionModel.forward in vllm/model_executor/models/mllama.py, 0.7.
    """
    patches = encoder.tokens_per_item // encoder.tiles
    padded = encoder.tiles * (-(-patches // _ROUND_PATCHES) * _ROUND_PATCHES)
    mlp = -(-encoder.mlp_width // settings.tensor_parallel_size)
    widths = (
        _STACKED * encoder.kept_layers + _BLOCK_WIDTHS
    ) * encoder.width + encoder.mlp_tensors * mlp
    each = padded**2 + padded * (widths + _PIXEL_COPIES * encoder.patch_elements)
    return items * each * element_bytes


# ``mm_processor_kwargs`` limits the size of an image or its number of tiles.
#
# Source: get_image_size_with_most_features of vllm/model_executor/models/qwen2_vl.py
# (``max_pixels``, else ``size``), get_max_image_tokens of internvl.py (``max_dynamic_patch``).
# oomguard ignores other arguments, including those of videos.

_OF_IMAGES: Final = "images_kwargs"  # transformers' processors also use this name


def encoder_of(model: Model, settings: VllmSettings) -> Encoder | None:
    """Return a model's encoder under a start's image settings, or None without encoder.

    Raises:
        SettingError: ``mm_processor_kwargs`` is not a JSON object.
    """
    if model.encoder is None:
        return None
    return apply_processor_settings(model.encoder, settings.mm_processor_kwargs)


def apply_processor_settings(encoder: Encoder, given: str | None) -> Encoder:
    """Return an encoder with the largest image that these arguments permit.

    Raises:
        SettingError: they are not a JSON object.
    """
    arguments = _read(given)
    pixels = largest_pixels(arguments)
    tiles = arguments.get("max_dynamic_patch")
    tokens = encoder.tokens_per_item
    if pixels and encoder.pixels_per_token:
        tokens = pixels // encoder.pixels_per_token
    elif is_count(tiles) and tiles > 0 and encoder.tokens_per_tile:
        tokens = (1 + tiles) * encoder.tokens_per_tile  # plus the whole image
    return replace(encoder, tokens_per_item=max(1, tokens))


def _read(given: str | None) -> Mapping[str, Any]:
    if given is None:
        return {}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingError(
            f"mm_processor_kwargs must be a JSON object, got {given!r}",
            hint='for example {"max_pixels": 1003520}',
        )
    nested = found.get(_OF_IMAGES)
    if isinstance(nested, dict):
        return {**found, **nested}
    return found


_MOST_PER_PROMPT: Final = 999  # vLLM's own default
_UNCERTAINTY_RATIO: Final = 0.2  # six printed peaks were within 0.11, most others within this
_FRAMES_OF_AN_IMAGE: Final = 2  # the frames per patch (temporal_patch_size)


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """Report the number of profiled items and the bytes of the encoder's peak and outputs.

    The outputs stay allocated for the language model. ``mlp_tensor_bytes`` is one tensor of the
    MLP's width for all patches of a rotary encoder. ``modality`` is the kind of item.
    """

    items: int
    tokens_per_item: int
    peak_bytes: int
    outputs_bytes: int
    mlp_tensor_bytes: int = 0
    modality: str = "image"

    def __str__(self) -> str:
        """Return the sentence for a budget's assumptions."""
        items = (
            f"{self.modality}s: profiled with {self.items} of {self.tokens_per_item} tokens each"
        )
        return f"{items}, {format_gib(self.peak_bytes)} at the peak"

    @property
    def uncertainty_bytes(self) -> int:
        """Return the uncertainty of the peak in both directions.

        Kernels differ by platform, and encoders in more than their widths.
        """
        return round(_UNCERTAINTY_RATIO * self.peak_bytes)


def profile_encoder(
    encoder: Encoder, settings: VllmSettings, element_bytes: int
) -> EncoderProfile | None:
    """Estimate the profile of an encoder on one rank; None if prompts may not have any item.

    Args:
        encoder: the encoder, as ``encoder_of`` returns it for these settings.
        settings: vLLM's settings with all defaults filled in.
        element_bytes: bytes per element of the activations.

    Raises:
        SettingError: vLLM would reject ``limit_mm_per_prompt``.
    """
    per_prompt = items_per_prompt(settings.limit_mm_per_prompt, encoder)
    if per_prompt == 0:
        return None
    if encoder.tiles:
        return _profile(encoder, settings, settings.max_num_seqs or 1, element_bytes)
    each = encoder.tokens_per_item
    if profiles_seats(settings.version):
        seats = profiled_seats(encoder, settings)
        tokens = each * _of_first_engine(settings.limit_mm_per_prompt, encoder)
        always = encoder.always_profiled and not since("images_always_until", settings.version)
        if tokens * seats > (settings.max_num_batched_tokens or 0) and not always:
            return None
        return _profile(encoder, settings, seats * tokens // each, element_bytes)
    rule = constant("encoder_profile", settings.version)
    counted = each
    modality = encoder.modality
    if encoder.takes_video and _counts(settings.limit_mm_per_prompt).get("video", 1):
        largest, counted = _with_videos(encoder, rule, settings)
        if largest is encoder:
            modality = encoder.modality
        else:
            modality = "video"
        encoder = largest
        each = largest.tokens_per_item
    budget = max(settings.max_num_batched_tokens or 0, counted)
    if settings.max_model_len is not None:
        per_prompt = max(1, min(per_prompt, settings.max_model_len // counted))
    items = max(1, min(budget // counted, (settings.max_num_seqs or 1) * per_prompt))
    found = _profile(
        encoder, settings, items, element_bytes, budget if rule.get("pads_outputs") else each
    )
    return replace(found, modality=modality)


def _with_videos(
    encoder: Encoder, rule: Mapping[str, Any], settings: VllmSettings
) -> tuple[Encoder, int]:
    """Return an encoder whose largest item may be a video, and the tokens of that item."""
    if encoder.framed_videos:
        each = encoder.tokens_per_item
        room = (settings.max_model_len or 0) // each - rule.get("images_beside_video", 0)
        frames = min(room, rule["video_frames"] // _FRAMES_OF_AN_IMAGE)
        if frames <= 1:
            return (encoder, each)
        return (replace(encoder, tokens_per_item=frames * each), frames * each)
    counted = round(encoder.formatted_video_tokens * rule.get("video_repeats", 0))
    if counted > encoder.tokens_per_item:
        return replace(encoder, tokens_per_item=encoder.formatted_video_tokens), counted
    if encoder.tokens_per_video is not None:
        video = encoder.tokens_per_video
        return replace(
            encoder, tokens_per_item=video, patches_per_token=encoder.patches_per_video / video
        ), video
    return encoder, encoder.tokens_per_item


def profiles_seats(version: Version) -> bool:
    """Return whether the version profiles requests with all their images.

    The first engine did (vllm/worker/model_runner.py, 0.7).
    """
    return not since("encoder_keeps_seats_until", version)


def profiled_seats(encoder: Encoder, settings: VllmSettings) -> int:
    """Return the number of requests that the first engine profiles.

    All their images' tokens must fit in a step; it profiles at least one request.
    """
    if encoder.tiles:
        return settings.max_num_seqs or 1
    tokens = encoder.tokens_per_item * max(
        1, _of_first_engine(settings.limit_mm_per_prompt, encoder)
    )
    return max(1, min(settings.max_num_seqs or 1, (settings.max_num_batched_tokens or 0) // tokens))


def _of_first_engine(limits: str | None, encoder: Encoder) -> int:
    if limits is None:
        return 1
    return items_per_prompt(limits, encoder)


def _profile(
    encoder: Encoder, settings: VllmSettings, items: int, element_bytes: int, kept_tokens: int = 0
) -> EncoderProfile:
    """Compute the profile of a number of items.

    The outputs of each have ``kept_tokens`` if that is more than the item's own.
    """
    each = encoder.tokens_per_item
    outputs = items * max(each, kept_tokens) * encoder.output_width * element_bytes
    if encoder.tiles:
        peak = tiles_peak_bytes(encoder, items, settings, element_bytes)
    else:
        patches = items * each * encoder.patches_per_token
        peak = round(patches * peak_elements(encoder, settings) * element_bytes)
        peak += items * each * encoder.output_width * element_bytes
        if encoder.attention == "rotary":
            width = -(-encoder.mlp_width // settings.tensor_parallel_size)
            return EncoderProfile(
                items, each, max(peak, outputs), outputs, round(patches * width * element_bytes)
            )
    return EncoderProfile(items, each, max(peak, outputs), outputs)


def uncut_tokens(encoder: Encoder | None, settings: VllmSettings) -> int:
    """Return the tokens that a step must not split, or 0.

    With cross-attention these are the longest audio and the longest request. Source:
    vllm/config/scheduler.py, which disables chunks for encoder-decoder models, and
    vllm/v1/core/encoder_cache_manager.py (0.32).
    """
    if encoder is None or encoder.in_prompt:
        return 0
    return max(encoder.tokens_per_item, settings.max_model_len or 0)


def items_per_prompt(limits: str | None, encoder: Encoder) -> int:
    """Return the most images, videos or audios of a prompt under ``limit_mm_per_prompt``.

    Raises:
        SettingError: the limit is invalid.
    """
    counts = _counts(limits)
    if encoder.takes_video:
        videos = counts.get("video", _MOST_PER_PROMPT)
    else:
        videos = 0
    return min(
        encoder.most_per_prompt or _MOST_PER_PROMPT,
        max(counts.get(encoder.modality, _MOST_PER_PROMPT), videos),
    )


def _counts(limits: str | None) -> dict[str, int]:
    """Return the counts in a limit by kind of item."""
    if limits is None:
        return {}
    try:
        if limits.lstrip().startswith("{"):
            given = json.loads(limits)
        else:
            given = dict(p.split("=") for p in limits.split(","))
        counts = {name: int(_limit(value)) for name, value in given.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise SettingError(
            f"limit_mm_per_prompt must map kinds to counts, got {limits!r}",
            hint='for example {"image": 1, "video": 0}',
        ) from None
    if any(value < 0 for value in counts.values()):
        raise SettingError(f"limit_mm_per_prompt has a count below 0: {limits!r}")
    return counts


def _limit(value: Any) -> Any:
    """Return a count, also from the newer form that includes sizes."""
    if isinstance(value, Mapping):
        return value.get("count", _MOST_PER_PROMPT)
    return value
