"""The rows of a comparison: versions, settings, parts of the budget and capacity, old beside new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from oomguard.difference import Kind, Row, Side, Unit, Value
from oomguard.facts import GIB, FactValue
from oomguard.remedy.settings import SETTINGS, default_value

UNKNOWN: Final = Value(None, "not printed")


# The fact that carries a setting's value where the log prints it elsewhere than in the list of settings.
_SETTING_FACTS: Final = MappingProxyType({
    "model": "model", "dtype": "dtype", "tensor_parallel_size": "tensor_parallel_size", "max_model_len": "max_model_len_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization_ratio", "mem_fraction_static": "mem_fraction_static_ratio",
    "max_num_seqs": "max_num_seqs", "max_num_batched_tokens": "max_num_batched_tokens", "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "prefix_caching", "kv_cache_memory_bytes": "kv_cache_memory_bytes",
})  # fmt: skip
# What a log shows in passing, never that it is off; named by a setting of its own in a list of settings.
_MARKS: Final = (
    ("speculative", "speculative_config"), ("lora", "enable_lora"), ("quantized", "quantization"), ("multimodal", "limit_mm_per_prompt"),
)  # fmt: skip
_UNITS: Final[Mapping[str, Unit]] = MappingProxyType({
    "gpu_memory_utilization": "ratio", "mem_fraction_static": "ratio", "max_model_len": "tokens", "max_num_batched_tokens": "tokens",
    "kv_cache_memory_bytes": "bytes",
})  # fmt: skip
_SAME_AS_MODEL: Final = frozenset({"model_tag", "model_path"})
# (name in the table, fact); solved parts of a start's budget come after the printed ones.
BUDGET: Final = (
    ("weights", "model_weights_bytes"), ("activations", "peak_activation_bytes"), ("CUDA graphs", "cudagraph_bytes"),
    ("non-torch", "non_torch_bytes"), ("KV cache", "kv_cache_available_bytes"),
)  # fmt: skip
_SOLVED_PARTS: Final = ("in use before the engine started", "free")
_SOLVED_SLACK_BYTES: Final = 0.02 * GIB  # a difference of printed sizes, each rounded to a hundredth of a GiB
_CAPACITY: Final[tuple[tuple[str, str, Unit], ...]] = (
    ("KV cache tokens", "kv_cache_capacity_tokens", "tokens"), ("full requests at once", "max_concurrency", ""),
    ("KV cache of one full request", "kv_cache_needed_bytes", "bytes"), ("KV cache of one token", "kv_bytes_per_token", "bytes"),
)  # fmt: skip


def rows_of(old: Side, new: Side) -> tuple[Row, ...]:
    """Every row that at least one of the two logs tells something for."""
    rows = [*_versions(old, new), *_settings(old, new), *_budget(old, new), *_capacity(old, new)]
    return tuple(row for row in rows if {row.old.origin, row.new.origin} != {"not printed"})


def _versions(old: Side, new: Side) -> Iterator[Row]:
    for name, told in (("engine", _engine), ("engine version", _version), ("torch version", _torch)):
        yield Row(name, "version", _told(told(old)), _told(told(new)))


def _engine(side: Side) -> str | None:
    return None if side.start.framework == "unknown" else side.start.framework


def _version(side: Side) -> str | None:
    return side.version


def _torch(side: Side) -> str | None:
    own = side.value("torch_version")
    return None if own is None else str(own)


def _told(value: FactValue | None) -> Value:
    return UNKNOWN if value is None else Value(value)


def _settings(old: Side, new: Side) -> Iterator[Row]:
    named = {**old.start.settings, **new.start.settings}.keys() - _SAME_AS_MODEL
    known = {name for name, fact in _SETTING_FACTS.items() if fact in old.start.facts or fact in new.start.facts}
    known |= {
        name
        for name, knob in SETTINGS.items()
        if knob.default_in and "vllm" in {old.start.framework, new.start.framework}
    }
    listed = ["model", *SETTINGS, *sorted(named - SETTINGS.keys() - {"model"})]
    for name in (n for n in listed if n in named | known):
        was, now = setting_of(old, name), setting_of(new, name)
        if {was.origin, now.origin} & {"printed", "solved"}:  # a default that nobody printed may be that very value
            was, now = (UNKNOWN if v.origin == "left alone" else v for v in (was, now))
        left = {was.origin, now.origin} <= {"default", "printed"} and not _touched(name, old, new)
        kind: Kind = "default" if left and name in SETTINGS and SETTINGS[name].default_in else "setting"
        if {was.origin, now.origin} != {"left alone"}:
            yield Row(name, kind, was, now, _UNITS.get(name, ""))
    for fact, setting in _MARKS:
        if setting not in named and (old.value(fact) or new.value(fact)):
            yield Row(fact, "setting", _mark(old, fact), _mark(new, fact))


def _touched(name: str, *sides: Side) -> bool:
    """Whether a user set it, or may have: only a full list of settings says that nobody did."""
    return any(name in side.start.settings or not side.start.settings_complete for side in sides)


def setting_of(side: Side, name: str) -> Value:
    """The value in force of one setting: as the user set it, as printed, or the default of the version."""
    start = side.start
    own = start.settings.get(name)
    fact = start.facts.get(_SETTING_FACTS.get(name, ""))
    if own is not None and own.value is not None and own.value != "auto":
        return Value(_plain(own.value), "printed" if own.set_by_user is False else "set")
    if fact is not None and fact.value != "auto":
        return Value(_plain(fact.value), "solved" if fact.source == "solved" else "printed")
    if own is not None:  # "auto", or an object that prints no value
        return UNKNOWN if own.value is None else Value(own.value, "set")
    if start.settings_complete and start.framework == "vllm":
        default = default_value(name, side.version) if name in SETTINGS and not side.value("on_cpu") else None
        return Value(None, "left alone") if default is None else Value(default, "default")
    return UNKNOWN


def _plain(value: FactValue) -> FactValue:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _mark(side: Side, fact: str) -> Value:
    if side.value(fact):
        return Value(True)
    return Value(False) if side.start.settings_complete else UNKNOWN


def _budget(old: Side, new: Side) -> Iterator[Row]:
    for name, fact in BUDGET:
        yield Row(name, "budget", _figure(old, fact, name), _figure(new, fact, name), "bytes")
    for name in _SOLVED_PARTS:
        yield Row(name, "budget", _part(old, name), _part(new, name), "bytes")
    for name, fact in (("allowed by the utilization", "desired_bytes"), ("device total", "device_total_bytes")):
        yield Row(name, "budget", _figure(old, fact), _figure(new, fact), "bytes")


def _capacity(old: Side, new: Side) -> Iterator[Row]:
    for name, fact, unit in _CAPACITY:
        yield Row(name, "capacity", _figure(old, fact), _figure(new, fact), unit)


def _figure(side: Side, fact: str, part: str = "") -> Value:
    own = side.start.facts.get(fact)
    if own is not None:
        return Value(own.value, "solved" if own.source == "solved" else "printed", own.slack)
    return _part(side, part) if part else UNKNOWN


def _part(side: Side, name: str) -> Value:
    before = side.start.facts.get("used_before_start_bytes")
    if name == "in use before the engine started" and before is not None:
        return Value(before.value, "solved", _SOLVED_SLACK_BYTES)
    part = next((part for part in side.start.budget.parts if part.name == name), None)
    return UNKNOWN if part is None else Value(part.bytes, "solved", _SOLVED_SLACK_BYTES)
