"""Reconstruct a failed start for the estimator: model, corrected settings, exact cache need."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from oomguard.core.errors import OomguardError, SettingError
from oomguard.core.facts import GIB, Fact, FactValue, format_gib, format_rounded
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.settings import SETTINGS, default_value, value_in_force
from oomguard.estimate.constants import latest, most_free_ratio, others_margin_ratio
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.encoder_profile import encoder_of, items_per_prompt, uncut_tokens
from oomguard.estimate.start.kv_cache import KvLayout, StartCaches, start_caches
from oomguard.estimate.start.start import (
    Correction,
    VllmSettings,
    most_default_rows,
    refuse_impossible,
    with_defaults,
)
from oomguard.estimate.start.start_budget import budget_start

# oomguard reads these separately, or they differ between a log and a plan: a share, an object
# without printed value, a request's own parameter.
_READ_APART: Final = frozenset({"gpu_memory_utilization", "speculative_config", "prompt_logprobs"})
_ON_DEVICE: Final = frozenset(
    {"cuda_oom", "hip_oom", "xpu_oom", "npu_oom", "sampler_warmup_oom", "pooler_warmup_oom"}
)
# The tensor that did not fit is rarely the last one. After the sampler's sort (18 bytes per logit)
# follow a softmax and two masks (24): vllm/v1/sample/ops/topk_topp_sampler.py
# apply_top_k_top_p_pytorch, 0.32.
_LATER_RATIO: Final = 1.1
_LATER_IN_SAMPLER_RATIO: Final = 24 / 18
_TYPES: Final = {"int": int, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class FailedStart:
    """Hold a model and the settings of its start."""

    model: Model
    settings: VllmSettings


def read_failed_start(
    incident: Incident, model: str | None = None, *, of_unknown_size: int | None = None
) -> FailedStart | None:
    """Read the start behind a vLLM incident.

    Args:
        incident: the incident with its derived facts.
        model: a model to read instead of the log's folder; None for the log's.
        of_unknown_size: the device's bytes if the log does not print them; None for none.

    Returns:
        The start; None if the model is unreadable here, the device's size is unknown, or the
            estimator rejects the settings.
    """
    named = model or _text(incident, "model")
    total = incident.number("device_total_bytes") or of_unknown_size
    if incident.framework != "vllm" or named is None or not total:
        return None
    settings = settings_of(
        incident.settings, incident.facts, incident.framework_version, round(total)
    )
    source = local_path(named) if model is None else model
    if source is None:
        read = None
    else:
        read = _read(str(source), settings.dtype, settings.quantization)
    if read is None:
        return None
    try:
        return FailedStart(read, _corrected(read, settings, incident))
    except OomguardError:
        return None


def with_exact_weights(incident: Incident, model: str | None = None) -> Incident:
    """Return the incident with one rank's weights from the model's files, not from its name.

    It returns unchanged if the start cannot be read; ``model`` as in ``read_failed_start``.
    """
    start = read_failed_start(incident, model)
    if start is None:
        return incident
    try:
        weights = budget_start(
            start.model, replace(start.settings, device_free_bytes=None)
        ).weights_bytes
    except OomguardError:
        return incident
    facts = {
        **incident.facts,
        "estimated_weights_bytes": Fact("estimated_weights_bytes", weights, "config"),
    }
    free = incident.number("device_free_bytes")
    if "weights_above_free" in facts and free is not None:
        facts["weights_above_free"] = Fact("weights_above_free", weights > free, "solved")
    return replace(incident, facts=MappingProxyType(facts))


def read_draft(incident: Incident, dtype: str) -> Model | None:
    """Read the draft model that the engine printed; None if there is none or it is unreadable."""
    named = _text(incident, "draft_model")
    source = None if named is None else local_path(named)
    if source is None:
        return None
    return _read(str(source), dtype, None)


def local_path(name: str) -> Path | None:
    """Return the local folder or file for a name in a log, including the hub's cache.

    Returns None otherwise, because a log must not trigger a download.
    """
    try:
        path = Path(name).expanduser()
        if path.exists():
            return path
        return _cached(name)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ):  # an impossible name, or another user's folder
        return None


def _cached(name: str) -> Path | None:
    """Return the folder of a model's configuration in the hub's cache, or None."""
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return Path(found).parent
    return None


def settings_of(
    in_force: Mapping[str, SettingInForce],
    facts: Mapping[str, Fact],
    framework_version: str | None,
    total_bytes: int,
) -> VllmSettings:
    """Return the engine's settings from the command, its echo and the log's lines.

    The free memory at the start is the printed one minus a margin for others. Memory that the
    engine requested and got was free.
    """
    values: dict[str, Any] = {}
    for own in fields(VllmSettings):
        name = own.name
        if name not in SETTINGS or name in _READ_APART:
            continue
        value = _value(in_force, facts, name)
        if value is None or type(value) is not _TYPES[SETTINGS[name].type]:
            continue  # unknown, or a form that only the engine understands
        if isinstance(value, str):
            values[name] = value.removeprefix("torch.")
        elif isinstance(value, bool) or value > 0:
            values[name] = value
    version = _version(framework_version)
    ratio = _value(in_force, facts, "gpu_memory_utilization")
    if not isinstance(ratio, float):
        ratio = float(default_value("gpu_memory_utilization", "vllm", str(version)) or 0)
    free = _free_at_start(facts)
    left = most_free_ratio() * total_bytes
    if free is not None and isinstance(free.value, (int, float)):
        left = float(free.value) - free.slack - others_margin_ratio() * total_bytes
    if free is None or float(free.value) >= ratio * total_bytes:
        left = max(left, ratio * total_bytes)  # the engine's request at its start was available
    return VllmSettings(
        version=version,
        gpu_total_bytes=total_bytes,
        gpu_memory_utilization=ratio,
        device="cpu" if "on_cpu" in facts and facts["on_cpu"].value else "cuda",
        device_free_bytes=min(total_bytes, round(left)),
        **values,
    )


def fails_while_profiling(incident: Incident) -> bool:
    """Return whether an allocation failed in the profile run, before there was a KV cache."""
    on_device = incident.kind in _ON_DEVICE and incident.number("tried_bytes") is not None
    return (
        on_device
        and "profiling_frames" in incident.facts
        and not incident.facts.get("multimodal_frames")
    )


def _free_at_start(facts: Mapping[str, Fact]) -> Fact | None:
    """Return the free memory at the engine's start.

    After a failed allocation it is the free memory plus the engine's own.
    """
    free = facts.get("device_free_bytes")
    own = facts.get("own_bytes")
    if free is None or "tried_bytes" not in facts:
        return free
    if own is None:
        return None
    return replace(free, value=float(free.value) + float(own.value))


def _corrected(model: Model, settings: VllmSettings, incident: Incident) -> VllmSettings:
    """Correct the settings by the start's total use if the log shows it.

    Otherwise they only get the free memory.
    """
    if fails_while_profiling(incident):
        return _with_peak(model, settings, incident)
    left = incident.number("kv_cache_available_bytes")
    if (
        left is None
        or settings.kv_cache_memory_bytes is not None
        or settings.pipeline_parallel_size > 1
    ):
        return settings
    predicted = budget_start(model, settings)
    beyond = predicted.kv_cache_pool_bytes + predicted.kept_back_bytes - round(left)
    slack = incident.slack("kv_cache_available_bytes") + incident.slack("desired_bytes")
    correction = Correction(
        "the memory of this start", non_torch_bytes=beyond, uncertainty_bytes=round(slack)
    )
    return replace(settings, correction=correction)


def _with_peak(model: Model, settings: VllmSettings, incident: Incident) -> VllmSettings:
    """Correct the peak of a start that failed before its measurement.

    The correction uses the live memory besides the weights and the failed request.
    """
    tried = incident.number("tried_bytes") or 0
    alive = incident.number("allocated_bytes") or incident.number("own_bytes")
    if alive is None:
        return settings
    predicted = budget_start(model, settings)
    fullest = max(stage.weights_bytes for stage in predicted.stages)
    weights = incident.number("model_weights_bytes") or fullest
    ratio = (alive - weights + tried) / max(1, predicted.peak_activation_bytes)
    if incident.phase == "sampling_logits":
        later = _LATER_IN_SAMPLER_RATIO
    else:
        later = _LATER_RATIO
    beyond = incident.number("non_torch_bytes")
    correction = Correction(
        "the request of this start",
        non_torch_bytes=0 if beyond is None else round(beyond) - predicted.non_torch_bytes,
    )
    return replace(settings, correction=correction, peak_activation_ratio=max(1.0, ratio * later))


def _value(
    in_force: Mapping[str, SettingInForce], facts: Mapping[str, Fact], name: str
) -> FactValue | None:
    known = value_in_force(name, in_force, facts)
    if known is None:
        return None
    return known[0]


def _text(incident: Incident, name: str) -> str | None:
    value = _value(incident.settings, incident.facts, name)
    if isinstance(value, str) and value:
        return value
    return None


def _version(text: str | None) -> Version:
    try:
        return Version(Version(text or "").base_version)
    except InvalidVersion:
        return latest()


@functools.lru_cache(maxsize=8)
def _read(model: str, dtype: str, quantization: str | None) -> Model | None:
    """Read a model once, or return None if that fails."""
    try:
        return read_model(find_model(model), dtype=dtype, quantization=quantization)
    except Exception:  # noqa: BLE001
        # The files are untrusted. Whatever they contain, the diagnosis continues without the model.
        return None


# The exact KV cache need of a failed start comes from the model's configuration.
#
# Printed numbers are rounded to 0.01 GiB, and proportional estimates assume that every layer caches
# all tokens. The layout knows blocks, groups and windows. It counts only if it agrees with the
# engine's printed numbers.

TOO_SMALL: Final = "kv_cache_too_small_for_max_len"
# A step of fewer tokens makes a prefill disproportionately slow. Proposed values are multiples of
# this.
_FEWEST_STEP_TOKENS: Final = 64
# With larger blocks this share of the longest request is good enough.
_NEARLY: Final = 0.99
# Small steps make prompts slow, so a length must improve by more than this to be worth one.
_WORTH_A_STEP: Final = 1.25


@dataclass(frozen=True, slots=True)
class ExactKv:
    """Lay out the KV cache of a failed start like vLLM, over all pipeline stages.

    Attributes:
        model: the model.
        given: vLLM's settings without defaults.
        settings: the same settings with defaults.
        caches: the layout and the layers of each stage.
        fewest_step_tokens: the minimum of a step: one token per running request, and the tokens
            that must not be split.
    """

    model: Model
    given: VllmSettings
    settings: VllmSettings
    caches: StartCaches
    fewest_step_tokens: int

    @property
    def layout(self) -> KvLayout:
        """Return the groups of layers and their blocks."""
        return self.caches.layout

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block on the stage where it is widest."""
        return max(self.layout.block_bytes(stage) for stage in self.caches.stages)

    @property
    def request_bytes(self) -> int:
        """Return the bytes of one request of the full length, as the engine prints it.

        They exclude the engine's own null block.
        """
        return self.layout.request_blocks() * self.block_bytes

    @property
    def image_tokens(self) -> int | None:
        """Return the tokens of one image of the largest size.

        Returns None if prompts have no images or the model does not define the size.
        """
        try:
            encoder = encoder_of(self.model, self.settings)
            takes = (
                encoder is not None
                and items_per_prompt(self.settings.limit_mm_per_prompt, encoder) > 0
            )
        except SettingError:  # limits or arguments in a form that only the engine understands
            return None
        if encoder is not None and encoder.in_prompt and takes:
            return encoder.tokens_per_item
        return None

    @property
    def needed_blocks(self) -> int:
        """Return the fewest blocks with which the engine starts."""
        return self.layout.request_blocks() + 1

    def requests_at_once(self, blocks: int) -> int:
        """Return the largest possible concurrency, with one token per request."""
        return max(0, blocks - 1) // max(1, self.layout.request_blocks(1))

    def longest(self, blocks: int) -> int:
        """Return the longest request, up to the requested length, that fits in so many blocks."""
        return self.layout.longest(
            blocks * self.block_bytes, self.settings.max_model_len or 0, self._widest
        )

    @property
    def step_follows_length(self) -> bool:
        """Return whether vLLM shrinks the step for a shorter request, despite unsplit tokens."""
        return (
            self.given.max_num_batched_tokens is None
            and uncut_tokens(self.model.encoder, self.settings) > 0
        )

    def longest_with_its_step(self, blocks: int) -> int:
        """Return the longest request that fits next to vLLM's default step for it, or 0."""
        low = 0
        high = self.settings.max_model_len or 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if self._with_length(middle).needed_blocks <= blocks
                else (low, middle - 1)
            )
        found = self._with_length(low).settings
        if low and (found.max_num_batched_tokens or 0) >= uncut_tokens(self.model.encoder, found):
            return low
        return 0

    def _with_length(self, tokens: int) -> ExactKv:
        return self._as(
            with_defaults(replace(self.given, max_model_len=tokens), self.model.shape, [])
        )

    def fits_without_prefixes(self, blocks: int) -> bool:
        """Return whether a request only fits without prefix caching, which stores states."""
        without = self._as(replace(self.settings, enable_prefix_caching=False))
        return without.needed_blocks <= blocks < self.needed_blocks

    def step_tokens(self, blocks: int) -> int | None:
        """Return the largest step with which the full length fits, or None if none helps."""
        low = self._least_step // _FEWEST_STEP_TOKENS
        high = ((self.settings.max_num_batched_tokens or 0) - 1) // _FEWEST_STEP_TOKENS
        if high < low or self._with_step(low * _FEWEST_STEP_TOKENS).needed_blocks > blocks:
            return None
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._with_step(middle * _FEWEST_STEP_TOKENS).needed_blocks <= blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * _FEWEST_STEP_TOKENS

    def step_and_length(self, blocks: int) -> tuple[int, int] | None:
        """Return a step and the longest request that fits with it.

        Returns None if a smaller step alone is enough or does not help much.
        """
        least = self._least_step
        step = self.settings.max_num_batched_tokens or 0
        best = self._with_step(least).longest(blocks)
        alone = self.longest(blocks)
        if least >= step or best <= alone or best < alone * _WORTH_A_STEP:
            return None
        low = least // _FEWEST_STEP_TOKENS
        high = (step - 1) // _FEWEST_STEP_TOKENS
        while low < high:  # the largest step that costs no length
            middle = (low + high + 1) // 2
            keeps = self._with_step(middle * _FEWEST_STEP_TOKENS).longest(blocks) >= best
            low, high = (middle, high) if keeps else (low, middle - 1)
        return low * _FEWEST_STEP_TOKENS, best

    def block_tokens(self, pool_bytes: float, *, any_length: bool) -> int | None:
        """Return the largest block below the setting with which a request fits, or None.

        ``any_length``: the engine chooses the length itself, so a block size counts if it allows
        nearly the largest length.
        """
        lengths = {}
        for tokens, cache in self._smaller_blocks():
            lengths[tokens] = cache.longest(int(pool_bytes) // cache.block_bytes)
        if any_length:
            wanted = _NEARLY * max(lengths.values(), default=0)
        else:
            wanted = self.settings.max_model_len or 0
        enough = []
        for tokens, length in lengths.items():
            if length >= max(1, wanted):
                enough.append(tokens)
        return max(enough, default=None)

    def _smaller_blocks(self) -> Iterator[tuple[int, ExactKv]]:
        """Yield half the block size, a quarter and so on, each with its cache."""
        tokens = self.settings.block_size or 0
        while (tokens := tokens // 2) > 0:
            settings = replace(self.settings, block_size=tokens)
            try:
                refuse_impossible(settings, self.model.shape)
            except SettingError:
                return
            yield tokens, self._as(settings)

    @property
    def _least_step(self) -> int:
        return (
            -(-max(_FEWEST_STEP_TOKENS, self.fewest_step_tokens) // _FEWEST_STEP_TOKENS)
            * _FEWEST_STEP_TOKENS
        )

    @property
    def _widest(self) -> frozenset[int]:
        return max(self.caches.stages, key=self.layout.block_bytes)

    def _with_step(self, tokens: int) -> ExactKv:
        return self._as(replace(self.settings, max_num_batched_tokens=tokens))

    def _as(self, settings: VllmSettings) -> ExactKv:
        """Return the cache of the same start under other settings."""
        return replace(self, settings=settings, caches=start_caches(self.model, settings))


def exact_kv(start: FailedStart) -> ExactKv | None:
    """Return the KV cache of a start.

    Returns None if its configuration is not enough, or the engine would reject the settings.
    """
    if not start.model.exact:
        return None
    settings = with_defaults(start.settings, start.model.shape, [])
    try:
        refuse_impossible(settings, start.model.shape)
        fewest = max(
            most_default_rows(start.settings, settings), uncut_tokens(start.model.encoder, settings)
        )
        found = ExactKv(
            start.model, start.settings, settings, start_caches(start.model, settings), fewest
        )
    except OomguardError:
        return None
    if found.block_bytes > 0 and found.layout.request_blocks() > 0:
        return found
    return None


def kv_of(incident: Incident, model: str | None = None) -> ExactKv | None:
    """Return the KV cache of the start behind an incident, or None if unreadable.

    ``model`` as in ``with_exact_need``.
    """
    if "max_model_len_tokens" not in incident.facts:
        return None
    # A request's need does not depend on the device's size.
    start = read_failed_start(incident, model, of_unknown_size=80 * GIB)
    if start is None:
        return None
    return exact_kv(start)


def with_exact_need(incident: Incident, model: str | None = None) -> Incident:
    """Return the incident with the KV cache need of one request, from the model's configuration.

    It returns unchanged if the need cannot be computed. If printed numbers disagree by more than
    rounding, they stay, and the incident reports the conflict. oomguard reads ``model`` instead of
    the log's folder.
    """
    found = kv_of(incident, model)
    if found is None:
        return incident
    pool = pool_blocks(found, incident)
    contradicted = contradiction_of(found, incident)
    if contradicted is not None:
        return replace(incident, unknown=(*incident.unknown, contradicted))
    facts = dict(incident.facts)
    # A start that never sized its cache prints no need. The engine's null block is part of what is
    # missing.
    blocks = found.needed_blocks - (incident.kind == TOO_SMALL)
    new: dict[str, int | None] = {
        "kv_cache_needed_bytes": blocks * found.block_bytes,
        "kv_cache_needed_blocks": found.needed_blocks,
        "kv_cache_block_bytes": found.block_bytes,
        "image_tokens": found.image_tokens,
    }
    if (
        incident.number("max_model_len_tokens") or 0
    ) <= 0:  # "auto": the need is for the model's own length
        new["max_model_len_tokens"] = found.settings.max_model_len
    if (
        pool_bytes := _pool_bytes(found, incident)
    ) is not None and "num_gpu_blocks_override" not in facts:
        fits_itself = _fits_the_length(incident)
        if fits_itself or pool_bytes // found.block_bytes < found.needed_blocks:
            new["fitting_block_tokens"] = found.block_tokens(pool_bytes, any_length=fits_itself)
    if incident.kind == TOO_SMALL and pool is not None:
        new["fits_without_cached_prefixes"] = found.fits_without_prefixes(pool) or None
        if may_shrink_steps(found, incident):
            new["fitting_step_tokens"] = found.step_tokens(pool)
        if (
            found.step_follows_length
        ):  # the engine's own estimate uses the step of the requested length
            new["estimated_max_model_len_tokens"] = found.longest_with_its_step(pool)
        elif "estimated_max_model_len_tokens" not in facts:
            new["estimated_max_model_len_tokens"] = found.longest(pool)  # 0: not even one token
    for name, value in new.items():
        if value is not None:
            facts[name] = Fact(name, value, "config")
    return replace(incident, facts=MappingProxyType(facts))


def _fits_the_length(incident: Incident) -> bool:
    """Return whether the engine should find the length itself; it then prints the model's own.

    oomguard reads "auto" and -1 as a setting without a length.
    """
    asked = incident.settings.get("max_model_len")
    if asked is not None and (asked.set_by_user or asked.value is not None):
        return asked.value is None or isinstance(asked.value, str) or asked.value <= 0
    return (incident.number("max_model_len_tokens") or 0) <= 0


def may_shrink_steps(found: ExactKv, incident: Incident) -> bool:
    """Return whether steps may shrink: prompts can be split, or the unsplittable part is known."""
    if found.model.encoder is not None and not found.model.encoder.in_prompt:
        return True
    chunked = incident.settings.get("enable_chunked_prefill")
    return chunked is None or chunked.value is not False


def _pool_bytes(found: ExactKv, incident: Incident) -> float | None:
    """Return the minimum of bytes that the failed start had for its blocks, or None."""
    given = incident.number("kv_cache_memory_bytes")
    left = incident.number("kv_cache_available_bytes")
    if given is not None or left is None:
        return given
    # The engine prints the memory without its own null block there.
    return (
        left
        - incident.slack("kv_cache_available_bytes")
        + (found.block_bytes if incident.kind == TOO_SMALL else 0)
    )


def pool_blocks(found: ExactKv, incident: Incident) -> int | None:
    """Return the minimum of blocks that the failed start had, or None if unknown."""
    override = incident.number("num_gpu_blocks_override")
    if override is not None:
        return int(override)
    if "kv_cache_memory_bytes" not in incident.facts and incident.kind != TOO_SMALL:
        return None
    pool_bytes = _pool_bytes(found, incident)
    if pool_bytes is None:
        return None
    return int(pool_bytes) // found.block_bytes


def contradiction_of(found: ExactKv, incident: Incident) -> str | None:
    """Return a sentence about a printed number that the layout contradicts, or None.

    If there is one, the printed number counts, otherwise the layout.
    """
    return next(_contradictions(found, incident, pool_blocks(found, incident)), None)


def _contradictions(found: ExactKv, incident: Incident, pool: int | None) -> Iterator[str]:
    needed = incident.number("kv_cache_needed_bytes")
    slack = incident.slack("kv_cache_needed_bytes")
    if needed is not None and abs(needed - found.request_bytes) > slack:
        yield (
            f"KV cache layout: one request needs {format_gib(found.request_bytes)} by the "
            f"model's configuration, but {format_rounded(needed, slack)} as printed; the "
            "printed number counts"
        )
    estimate = incident.number("estimated_max_model_len_tokens")
    if (
        estimate is None
        or pool is None
        or incident.facts["estimated_max_model_len_tokens"].source == "config"
    ):
        return
    is_exact = (
        "num_gpu_blocks_override" in incident.facts or "kv_cache_memory_bytes" in incident.facts
    )
    longest = found.longest(pool)
    if longest > estimate or (is_exact and longest < estimate):
        yield (
            f"KV cache layout: {longest} tokens fit by the model's configuration, but "
            f"{int(estimate)} as printed; the printed number counts"
        )
