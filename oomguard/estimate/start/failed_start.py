"""Reconstruct a failed start for the estimator: its model, and its corrected settings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from oomguard.core.errors import OomguardError
from oomguard.core.facts import Fact, FactValue
from oomguard.core.incident import Incident, SettingInForce
from oomguard.core.settings import SETTINGS, default_value, value_in_force
from oomguard.estimate.constants import latest, most_free_ratio, others_margin_ratio
from oomguard.estimate.model.files import find_model
from oomguard.estimate.model.model import Model, read_model
from oomguard.estimate.start.start import Correction, VllmSettings
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
    for name in (
        own.name for own in fields(VllmSettings) if own.name in SETTINGS.keys() - _READ_APART
    ):
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
    weights = incident.number("model_weights_bytes") or max(
        stage.weights_bytes for stage in predicted.stages
    )
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
