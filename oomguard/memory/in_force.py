"""The start that failed, as the memory model sees it: the model it names and the settings in force, put right by what it printed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from oomguard.errors import OomguardError
from oomguard.facts import GIB, Fact, FactValue
from oomguard.incident import Incident, SettingInForce
from oomguard.memory.ceilings import most_free_ratio, others_margin_ratio
from oomguard.memory.constants import constant, latest
from oomguard.memory.model_files import find_model
from oomguard.memory.plan import plan_vllm
from oomguard.memory.prepared import Prepared, prepare
from oomguard.memory_plan import Correction, VllmSettings

# Where a setting's value is also a fact of another name.
_FACTS: Final = {"gpu_memory_utilization": "gpu_memory_utilization_ratio", "max_model_len": "max_model_len_tokens"}
_NUMBERS: Final = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "kv_cache_memory_bytes", "block_size", "max_loras", "max_lora_rank",
)  # fmt: skip
_YES_NO: Final = ("enable_expert_parallel", "enforce_eager", "enable_prefix_caching", "enable_lora")
_TEXTS: Final = ("kv_cache_dtype", "dtype", "quantization", "mamba_ssm_cache_dtype", "limit_mm_per_prompt")


@dataclass(frozen=True, slots=True)
class Start:
    """A model and the settings it was started with."""

    model: Prepared
    settings: VllmSettings


def start_in_force(incident: Incident, model: str | None = None, *, of_unknown_size: int | None = None) -> Start | None:
    """The start behind an incident of vLLM; ``model`` in place of the folder that the log names.

    None where the model cannot be read here, the device's size is not known and ``of_unknown_size`` does not stand in for it, or
    the settings are none that can be planned.
    """
    named = model or _text(incident, "model")
    total = incident.number("device_total_bytes") or of_unknown_size
    if incident.framework != "vllm" or named is None or not total:
        return None
    settings = settings_of(incident.settings, incident.facts, incident.framework_version, round(total))
    source = local_path(named) if model is None else model
    prepared = None if source is None else _prepared(str(source), settings.dtype, settings.quantization)
    if prepared is None:
        return None
    try:
        return Start(prepared, _corrected(prepared, settings, incident))
    except OomguardError:
        return None


def local_path(name: str) -> Path | None:
    """A folder or file of this machine by the name that a log has; None for any other, since nothing is fetched for what a log holds."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # no such user, a name too long, a folder of someone else
        return None


def settings_of(
    in_force: Mapping[str, SettingInForce], facts: Mapping[str, Fact], framework_version: str | None, total_bytes: int
) -> VllmSettings:
    """The engine's settings in force, as far as the command, its echo and the log's own lines tell them."""
    values: dict[str, Any] = {}
    for name in (*_NUMBERS, *_YES_NO, *_TEXTS):
        value = _value(in_force, facts, name)
        if isinstance(value, bool):
            if name in _YES_NO:
                values[name] = value
        elif isinstance(value, str):
            if name in _TEXTS:
                values[name] = value.removeprefix("torch.")
        elif isinstance(value, int) and name in _NUMBERS and value > 0:
            values[name] = value
    version = _version(framework_version)
    ratio = _value(in_force, facts, "gpu_memory_utilization")
    if not isinstance(ratio, float):
        ratio = float(constant("utilization", version)["default_ratio"])
    free = facts.get("device_free_bytes")
    left = most_free_ratio() * total_bytes
    if free is not None and isinstance(free.value, (int, float)):
        left = float(free.value) - free.slack - others_margin_ratio() * total_bytes
    if free is None or float(free.value) >= ratio * total_bytes:
        left = max(left, ratio * total_bytes)  # what the engine asked for at its start was there
    return VllmSettings(
        version=version, gpu_total_bytes=total_bytes, gpu_memory_utilization=ratio,
        device="cpu" if "on_cpu" in facts and facts["on_cpu"].value else "cuda",
        device_free_bytes=min(total_bytes, round(left)), **values,
    )  # fmt: skip


def _corrected(model: Prepared, settings: VllmSettings, incident: Incident) -> VllmSettings:
    """The settings with what the start printed: what it held in all, else only what is free."""
    left = incident.number("kv_cache_available_bytes")
    if left is None or settings.kv_cache_memory_bytes is not None or settings.pipeline_parallel_size > 1:
        return settings
    predicted = plan_vllm(model, settings)
    beyond = predicted.kv_cache_pool_bytes - round(left)
    slack = incident.slack("kv_cache_available_bytes") + incident.slack("desired_bytes")
    correction = Correction("what this start held", non_torch_bytes=beyond, uncertainty_bytes=round(slack))
    return replace(settings, correction=correction)


def add_kv_need(incident: Incident, facts: dict[str, Fact], model: str | None = None) -> None:
    """Add the KV cache that one request needs, from the model's own configuration, where the log does not print it."""
    if "kv_cache_needed_bytes" in facts or "max_model_len_tokens" not in facts:
        return
    # What a request needs does not follow from the device's size.
    start = start_in_force(replace(incident, facts=facts), model, of_unknown_size=80 * GIB)
    if start is None or not start.model.exact:
        return
    try:
        needed = max(stage.needed_bytes for stage in plan_vllm(start.model, start.settings).stages)
    except OomguardError:
        return
    facts["kv_cache_needed_bytes"] = Fact("kv_cache_needed_bytes", needed, "config")


def _value(in_force: Mapping[str, SettingInForce], facts: Mapping[str, Fact], name: str) -> FactValue | None:
    setting = in_force.get(name)
    if setting is not None and setting.value is not None:
        return setting.value
    fact = facts.get(_FACTS.get(name, name))
    return None if fact is None else fact.value


def _text(incident: Incident, name: str) -> str | None:
    value = _value(incident.settings, incident.facts, name)
    return value if isinstance(value, str) and value else None


def _version(text: str | None) -> Version:
    try:
        return Version(Version(text or "").base_version)
    except InvalidVersion:
        return latest()


@functools.lru_cache(maxsize=8)
def _prepared(model: str, dtype: str, quantization: str | None) -> Prepared | None:
    """The model read once; None where it cannot be read."""
    try:
        return prepare(find_model(model), dtype=dtype, quantization=quantization)
    except OomguardError:
        return None
