"""What the encoder of images or audio takes while vLLM profiles it: as many images as a step's tokens allow, all at once.

How many items, of how many tokens: vllm/multimodal/encoder_budget.py, or audios for Whisper. Other audio and video are not counted.
encoder_peak.py has what each of their patches takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from packaging.version import Version

from oomguard.errors import SettingError
from oomguard.facts import format_gib
from oomguard.memory.constants import constant, since
from oomguard.memory.model.encoder import Encoder
from oomguard.memory.vllm.encoder_peak import peak_elements, tiles_peak_bytes
from oomguard.memory.vllm.start import VllmSettings

NO_IMAGES: Final = '{"image": 0, "video": 0}'
_MOST_PER_PROMPT: Final = 999  # vLLM's own where the user names none
_UNCERTAINTY_RATIO: Final = 0.2  # six printed peaks lay within 0.11, most of the others within this
_FRAMES_OF_AN_IMAGE: Final = 2  # a patch is one of so many frames (temporal_patch_size)


@dataclass(frozen=True, slots=True)
class EncoderProfile:
    """How many items are profiled at once, bytes at the encoder's peak, and of its outputs, which stay for the language model's.

    ``mlp_tensor_bytes`` is one tensor of its MLP's width for all patches, of an encoder with rotary attention; ``modality`` is what
    they are.
    """

    items: int
    tokens_per_item: int
    peak_bytes: int
    outputs_bytes: int
    mlp_tensor_bytes: int = 0
    modality: str = "image"

    def __str__(self) -> str:
        """Return the sentence that a budget lists among its assumptions."""
        items = f"{self.modality}s: profiled with {self.items} of {self.tokens_per_item} tokens each"
        return f"{items}, {format_gib(self.peak_bytes)} at the peak"

    @property
    def uncertainty_bytes(self) -> int:
        """Bytes to either side of the peak: kernels differ by platform, and encoders by more than their widths."""
        return round(_UNCERTAINTY_RATIO * self.peak_bytes)


def profile_encoder(encoder: Encoder, settings: VllmSettings, element_bytes: int) -> EncoderProfile | None:
    """Profile an encoder on one rank; return None where prompts may have nothing for it.

    Args:
        encoder: the encoder by the model's configuration, as ``encoder_of`` gives it for these settings.
        settings: vLLM's settings with all defaults filled in.
        element_bytes: bytes of an element of the activations.

    Raises:
        SettingError: ``limit_mm_per_prompt`` is not a limit that vLLM takes.
    """
    per_prompt = items_per_prompt(settings.limit_mm_per_prompt, encoder)
    if per_prompt == 0:
        return None
    if encoder.tiles:
        return _profile(encoder, settings, settings.max_num_seqs or 1, element_bytes)
    each = encoder.tokens_per_item
    if profiles_seats(settings.version):
        seats, tokens = (
            profiled_seats(encoder, settings),
            each * _of_first_engine(settings.limit_mm_per_prompt, encoder),
        )
        always = encoder.always_profiled and not since("images_always_until", settings.version)
        if tokens * seats > (settings.max_num_batched_tokens or 0) and not always:
            return None
        return _profile(encoder, settings, seats * tokens // each, element_bytes)
    rule, counted = constant("encoder_profile", settings.version), each
    modality = encoder.modality
    if encoder.takes_video and _counts(settings.limit_mm_per_prompt).get("video", 1):
        largest, counted = _with_videos(encoder, rule, settings)
        modality = encoder.modality if largest is encoder else "video"
        encoder, each = largest, largest.tokens_per_item
    budget = max(settings.max_num_batched_tokens or 0, counted)
    if settings.max_model_len is not None:
        per_prompt = max(1, min(per_prompt, settings.max_model_len // counted))
    items = max(1, min(budget // counted, (settings.max_num_seqs or 1) * per_prompt))
    found = _profile(encoder, settings, items, element_bytes, budget if rule.get("pads_outputs") else each)
    return replace(found, modality=modality)


def _with_videos(encoder: Encoder, rule: Mapping[str, Any], settings: VllmSettings) -> tuple[Encoder, int]:
    """Return an encoder whose largest item is a video where one is larger than any image, with the tokens that it counts for."""
    if encoder.framed_videos:
        each = encoder.tokens_per_item
        room = (settings.max_model_len or 0) // each - rule.get("images_beside_video", 0)
        frames = min(room, rule["video_frames"] // _FRAMES_OF_AN_IMAGE)
        return (encoder, each) if frames <= 1 else (replace(encoder, tokens_per_item=frames * each), frames * each)
    counted = round(encoder.formatted_video_tokens * rule.get("video_repeats", 0))
    if counted > encoder.tokens_per_item:
        return replace(encoder, tokens_per_item=encoder.formatted_video_tokens), counted
    if encoder.tokens_per_video is not None:
        video = encoder.tokens_per_video
        return replace(encoder, tokens_per_item=video, patches_per_token=encoder.patches_per_video / video), video
    return encoder, encoder.tokens_per_item


def profiles_seats(version: Version) -> bool:
    """Whether the version's engine profiles requests with all their images, as the first one did (vllm/worker/model_runner.py, 0.7)."""
    return not since("encoder_keeps_seats_until", version)


def profiled_seats(encoder: Encoder, settings: VllmSettings) -> int:
    """Return how many requests that engine profiles: as many as have their images' tokens in a step, one at least."""
    if encoder.tiles:
        return settings.max_num_seqs or 1
    tokens = encoder.tokens_per_item * max(1, _of_first_engine(settings.limit_mm_per_prompt, encoder))
    return max(1, min(settings.max_num_seqs or 1, (settings.max_num_batched_tokens or 0) // tokens))


def _of_first_engine(limits: str | None, encoder: Encoder) -> int:
    return 1 if limits is None else items_per_prompt(limits, encoder)


def _profile(
    encoder: Encoder, settings: VllmSettings, items: int, element_bytes: int, kept_tokens: int = 0
) -> EncoderProfile:
    """Profile so many items; the outputs of each are kept as large as ``kept_tokens`` where those are more than its own."""
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
            return EncoderProfile(items, each, max(peak, outputs), outputs, round(patches * width * element_bytes))
    return EncoderProfile(items, each, max(peak, outputs), outputs)


def uncut_tokens(encoder: Encoder | None, settings: VllmSettings) -> int:
    """Return what a step must hold whole: the longest audio and the longest request where a decoder attends across, else 0.

    Source: vllm/config/scheduler.py, which takes chunks from encoder-decoder models, and vllm/v1/core/encoder_cache_manager.py (0.32).
    """
    if encoder is None or encoder.in_prompt:
        return 0
    return max(encoder.tokens_per_item, settings.max_model_len or 0)


def items_per_prompt(limits: str | None, encoder: Encoder) -> int:
    """Return the most images, videos or audios of a prompt under ``limit_mm_per_prompt``; raises SettingError for a bad limit."""
    counts = _counts(limits)
    videos = counts.get("video", _MOST_PER_PROMPT) if encoder.takes_video else 0
    return min(encoder.most_per_prompt or _MOST_PER_PROMPT, max(counts.get(encoder.modality, _MOST_PER_PROMPT), videos))


def _counts(limits: str | None) -> dict[str, int]:
    """Return the counts that a limit names, of each kind of item."""
    if limits is None:
        return {}
    try:
        given = json.loads(limits) if limits.lstrip().startswith("{") else dict(p.split("=") for p in limits.split(","))
        counts = {name: int(_limit(value)) for name, value in given.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise SettingError(f"limit_mm_per_prompt is {limits!r}", hint='for example {"image": 1, "video": 0}') from None
    if any(value < 0 for value in counts.values()):
        raise SettingError(f"limit_mm_per_prompt is {limits!r}, with a count below 0")
    return counts


def _limit(value: Any) -> Any:
    """Return a count, also from the newer form that has sizes beside it."""
    return value.get("count", _MOST_PER_PROMPT) if isinstance(value, Mapping) else value
