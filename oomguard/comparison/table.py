"""Build the table of a comparison: versions, settings, budget parts and capacity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from oomguard.comparison.comparison import ComparedStart, ComparedValue, Kind, Row
from oomguard.core.facts import GIB, FactValue
from oomguard.core.settings import SETTING_FACTS, SETTINGS, Unit, default_value, surfaces

UNKNOWN: Final = ComparedValue(None, "not printed")
# Pairs of fact and setting: a log shows that these are on, never that they are off. A list of
# settings has the setting itself.
_MARKS: Final = (
    ("speculative", "speculative_config"),
    ("lora", "enable_lora"),
    ("quantized", "quantization"),
    ("multimodal", "limit_mm_per_prompt"),
)
_SAME_AS_MODEL: Final = frozenset({"model_tag", "model_path"})
# Pairs of the name in the table and the fact. Derived parts come after the printed ones.
BUDGET: Final = (
    ("weights", "model_weights_bytes"),
    ("activations", "peak_activation_bytes"),
    ("CUDA graphs", "cudagraph_bytes"),
    ("non-torch", "non_torch_bytes"),
    ("KV cache", "kv_cache_available_bytes"),
)
_SOLVED_PARTS: Final = ("in use at the start", "free")
_SOLVED_SLACK_BYTES: Final = 0.02 * GIB  # a difference of printed sizes, each rounded to 0.01 GiB
_CAPACITY: Final[tuple[tuple[str, str, Unit], ...]] = (
    ("KV cache tokens", "kv_cache_capacity_tokens", "tokens"),
    ("full requests at once", "max_concurrency", ""),
    ("KV cache of one full request", "kv_cache_needed_bytes", "bytes"),
    ("KV cache of one token", "kv_bytes_per_token", "bytes"),
)


def rows_of(old: ComparedStart, new: ComparedStart) -> tuple[Row, ...]:
    """Return every row for which at least one log has a value."""
    rows = [*_versions(old, new), *_settings(old, new), *_budget(old, new), *_capacity(old, new)]
    return tuple(row for row in rows if {row.old.origin, row.new.origin} != {"not printed"})


def _versions(old: ComparedStart, new: ComparedStart) -> Iterator[Row]:
    for name, read in (
        ("engine", _engine),
        ("engine version", _version),
        ("torch version", _torch),
    ):
        yield Row(name, "version", _printed(read(old)), _printed(read(new)))


def _engine(side: ComparedStart) -> str | None:
    if side.start.framework == "unknown":
        return None
    return side.start.framework


def _version(side: ComparedStart) -> str | None:
    return side.version


def _torch(side: ComparedStart) -> str | None:
    own = side.value("torch_version")
    if own is None:
        return None
    return str(own)


def _printed(value: FactValue | None) -> ComparedValue:
    if value is None:
        return UNKNOWN
    return ComparedValue(value)


def _settings(old: ComparedStart, new: ComparedStart) -> Iterator[Row]:
    named = {**old.start.settings, **new.start.settings}.keys() - _SAME_AS_MODEL
    known = {
        name
        for name, fact in SETTING_FACTS.items()
        if fact in old.start.facts or fact in new.start.facts
    }
    for side in (old, new):
        names = surfaces(side.start.framework)
        known |= {name for name in names if _default(side, name) is not None}
    listed = ["model", *SETTINGS, *sorted(named - SETTINGS.keys() - {"model"})]
    for name in (n for n in listed if n in named | known):
        was = setting_of(old, name)
        now = setting_of(new, name)
        if {was.origin, now.origin} & {
            "printed",
            "solved",
        }:  # a default that no log prints may be that very value
            was, now = (UNKNOWN if v.origin == "left alone" else v for v in (was, now))
        left = {was.origin, now.origin} <= {"default", "printed"} and not _touched(name, old, new)
        kind: Kind = "default" if left and _default(new, name) is not None else "setting"
        if {was.origin, now.origin} != {"left alone"}:
            yield Row(name, kind, was, now, SETTINGS[name].unit if name in SETTINGS else "")
    for fact, setting in _MARKS:
        if setting not in named and (old.value(fact) or new.value(fact)):
            yield Row(fact, "setting", _mark(old, fact), _mark(new, fact))


def _touched(name: str, *sides: ComparedStart) -> bool:
    """Return whether the user may have set it; only a full list of settings excludes that."""
    return any(name in side.start.settings or not side.start.settings_complete for side in sides)


def setting_of(side: ComparedStart, name: str) -> ComparedValue:
    """Return the effective value of a setting: set by the user, printed, or the default."""
    start = side.start
    own = start.settings.get(name)
    fact = start.facts.get(SETTING_FACTS.get(name, ""))
    if own is not None and own.value is not None and own.value != "auto":
        return ComparedValue(_plain(own.value), "printed" if own.set_by_user is False else "set")
    if fact is not None and fact.value != "auto":
        return ComparedValue(_plain(fact.value), "solved" if fact.source == "solved" else "printed")
    if own is not None:  # "auto", or an object without printed value
        if own.value is None:
            return UNKNOWN
        return ComparedValue(own.value, "set")
    if start.settings_complete and surfaces(start.framework):
        if side.value("on_cpu"):
            default = None
        else:
            default = _default(side, name)
        if default is None:
            return ComparedValue(None, "left alone")
        return ComparedValue(default, "default")
    return UNKNOWN


def _default(side: ComparedStart, name: str) -> FactValue | None:
    """Return the version's default of a setting, or None if unknown or not fixed."""
    return default_value(name, side.start.framework, side.version)


def _plain(value: FactValue) -> FactValue:
    if isinstance(value, str):
        return value.removeprefix("torch.")
    return value


def _mark(side: ComparedStart, fact: str) -> ComparedValue:
    if side.value(fact):
        return ComparedValue(True)
    if side.start.settings_complete:
        return ComparedValue(False)
    return UNKNOWN


def _budget(old: ComparedStart, new: ComparedStart) -> Iterator[Row]:
    for name, fact in BUDGET:
        yield Row(name, "budget", _figure(old, fact, name), _figure(new, fact, name), "bytes")
    for name in _SOLVED_PARTS:
        yield Row(name, "budget", _part(old, name), _part(new, name), "bytes")
    for name, fact in (
        ("allowed by the utilization", "desired_bytes"),
        ("device total", "device_total_bytes"),
    ):
        yield Row(name, "budget", _figure(old, fact), _figure(new, fact), "bytes")


def _capacity(old: ComparedStart, new: ComparedStart) -> Iterator[Row]:
    for name, fact, unit in _CAPACITY:
        yield Row(name, "capacity", _figure(old, fact), _figure(new, fact), unit)


def _figure(side: ComparedStart, fact: str, part: str = "") -> ComparedValue:
    own = side.start.facts.get(fact)
    if own is not None:
        return ComparedValue(
            own.value, "solved" if own.source == "solved" else "printed", own.slack
        )
    if part:
        return _part(side, part)
    return UNKNOWN


def _part(side: ComparedStart, name: str) -> ComparedValue:
    before = side.start.facts.get("used_before_start_bytes")
    if name == "in use at the start" and before is not None:
        return ComparedValue(before.value, "solved", _SOLVED_SLACK_BYTES)
    part = next((part for part in side.start.budget.parts if part.name == name), None)
    if part is None:
        return UNKNOWN
    return ComparedValue(part.bytes, "solved", _SOLVED_SLACK_BYTES)
