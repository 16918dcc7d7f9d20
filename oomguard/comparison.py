"""Compare a start that worked with one that failed: ``oomguard.diff``.

Its parts are the records, the table of rows, the explanations with bytes, and the two sides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from oomguard.core.errors import InputError, UsageError
from oomguard.core.facts import GIB, MIB, Fact, FactValue, format_gib
from oomguard.core.incident import Diagnosis, EngineStart, Incident
from oomguard.core.records import Record
from oomguard.core.settings import SETTING_FACTS, SETTINGS, Unit, default_value, surfaces
from oomguard.core.text import strip_escapes
from oomguard.diagnosis import diagnose, diagnose_stream
from oomguard.estimate.budget import budget_of_start
from oomguard.remedy.policy import Policy
from oomguard.rules.rule_files import RuleSet
from oomguard.scan.source import open_log, open_standard_input, printable_path

Kind = Literal["version", "setting", "default", "budget", "capacity"]
# The source of a value. A setting "left alone" has no value; "not printed" is unknown.
Origin = Literal["set", "printed", "default", "solved", "left alone", "not printed"]


@dataclass(frozen=True, slots=True, repr=False)
class ComparedStart(Record):
    """Hold one of two compared starts.

    ``incident`` is its failure, None if it worked. ``starts`` is the number of starts in its log.
    """

    source: str
    start: EngineStart
    incident: Incident | None = None
    starts: int = 1
    notes: tuple[str, ...] = ()

    def number(self, name: str) -> float | None:
        """Return a numeric fact of the start in the unit of its name, or None if unknown."""
        fact = self.start.facts.get(name)
        if fact is None or isinstance(fact.value, (str, bool)):
            return None
        return fact.value

    def value(self, name: str) -> FactValue | None:
        """Return any fact of the start, or None if unknown."""
        fact = self.start.facts.get(name)
        if fact is None:
            return None
        return fact.value

    @property
    def version(self) -> str | None:
        """Return the engine's version in the log, or None."""
        own = self.start.framework_version or self.value("framework_version")
        if own is None:
            return None
        return str(own)

    @property
    def outcome(self) -> str:
        """Return ``worked``, or the kind of the failure."""
        if self.incident is None:
            return "worked"
        return self.incident.kind

    @property
    def utilization(self) -> float | None:
        """Return the share of the device for the engine, 0 to 1; None if unknown."""
        own = self.number("gpu_memory_utilization_ratio")
        if own is not None:
            return own
        return self.number("mem_fraction_static_ratio")

    @property
    def pool_is_given(self) -> bool:
        """Return whether the user set the size of the KV cache in bytes."""
        return self.number("kv_cache_memory_bytes") is not None


@dataclass(frozen=True, slots=True, repr=False)
class ComparedValue(Record):
    """Hold one side of a row.

    ``value`` is None if it is unknown or was left alone. ``slack`` is its rounding in the row's
    unit.
    """

    value: FactValue | None
    origin: Origin = "printed"
    slack: float = 0.0

    @property
    def number(self) -> float | None:
        """Return the value if it is a number, else None."""
        if isinstance(self.value, (str, bool)):
            return None
        return self.value


@dataclass(frozen=True, slots=True, repr=False)
class Row(Record):
    """Compare one thing; if only one log prints it, it is not a change."""

    name: str
    kind: Kind
    old: ComparedValue
    new: ComparedValue
    unit: Unit = ""

    @property
    def known(self) -> bool:
        """Return whether both logs have a value."""
        return "not printed" not in {self.old.origin, self.new.origin}

    @property
    def changed(self) -> bool:
        """Return whether both logs have a value and differ by more than rounding."""
        if not self.known:
            return False
        if self.difference is not None:
            return abs(self.difference) > self.slack
        return self.old.value != self.new.value

    @property
    def difference(self) -> float | None:
        """Return new minus old, or None unless both are numbers."""
        old = self.old.number
        new = self.new.number
        if old is None or new is None:
            return None
        return round(new - old, 9)

    @property
    def slack(self) -> float:
        """Return how much of the difference may be rounding."""
        return (self.old.slack + self.new.slack) * (1 + 1e-9) + (
            1e-9 if self.unit == "ratio" else 0
        )


RowsByName = Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Hold one sentence and its effect.

    ``kv_cache_bytes`` is its cause's effect on the KV cache (negative: less); None if unknown.
    """

    text: str
    kv_cache_bytes: float | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Record):
    """Hold two starts and their changes; ``unknown`` lists what the logs do not show."""

    old: ComparedStart
    new: ComparedStart
    headline: str
    rows: tuple[Row, ...]
    explanations: tuple[Explanation, ...]
    unknown: tuple[str, ...]

    @property
    def changes(self) -> tuple[Row, ...]:
        """Return the rows that both logs have with different values."""
        found = []
        for row in self.rows:
            if row.changed:
                found.append(row)
        return tuple(found)

    @property
    def differs(self) -> bool:
        """Return whether anything changed: a row, or whether and how the start failed."""
        return bool(self.changes) or self.old.outcome != self.new.outcome


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
# A difference of printed sizes, each rounded to 0.01 GiB.
_SOLVED_SLACK_BYTES: Final = 0.02 * GIB
_CAPACITY: Final[tuple[tuple[str, str, Unit], ...]] = (
    ("KV cache tokens", "kv_cache_capacity_tokens", "tokens"),
    ("full requests at once", "max_concurrency", ""),
    ("KV cache of one full request", "kv_cache_needed_bytes", "bytes"),
    ("KV cache of one token", "kv_bytes_per_token", "bytes"),
)


def rows_of(old: ComparedStart, new: ComparedStart) -> tuple[Row, ...]:
    """Return every row for which at least one log has a value."""
    rows = [
        *_version_rows(old, new),
        *_settings(old, new),
        *_budget(old, new),
        *_capacity(old, new),
    ]
    found = []
    for row in rows:
        if {row.old.origin, row.new.origin} != {"not printed"}:
            found.append(row)
    return tuple(found)


def _version_rows(old: ComparedStart, new: ComparedStart) -> Iterator[Row]:
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
    known = set()
    for name, fact in SETTING_FACTS.items():
        if fact in old.start.facts or fact in new.start.facts:
            known.add(name)
    for side in (old, new):
        names = surfaces(side.start.framework)
        for name in names:
            if _default(side, name) is not None:
                known.add(name)
    listed = ["model", *SETTINGS, *sorted(named - SETTINGS.keys() - {"model"})]
    for name in listed:
        if name not in named | known:
            continue
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
    # "auto", or an object without printed value.
    if own is not None:
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
    for part in side.start.budget.parts:
        if part.name == name:
            return ComparedValue(part.bytes, "solved", _SOLVED_SLACK_BYTES)
    return UNKNOWN


# vLLM's version changes the engine's generation and when it counts CUDA graphs.

# From these versions on vLLM runs V1 by default, runs only V1, and counts CUDA graphs before the KV
# cache.
_V1_BY_DEFAULT: Final = "0.8.0"
_V1_ONLY: Final = "0.11.0"
_GRAPHS_COUNTED: Final = "0.20.0"


def engine_generation(old: ComparedStart, new: ComparedStart) -> Iterator[Explanation]:
    """Explain the change from vLLM's V0 engine to V1."""
    if at_least(old, _V1_BY_DEFAULT) is False and at_least(new, _V1_BY_DEFAULT):
        if at_least(new, _V1_ONLY):
            only = ""
        else:
            only = " by default"
        yield Explanation(
            f"vLLM {old.version} runs its V0 engine, {new.version} its V1 engine{only}. "
            "V1 batches more tokens in one step, captures more CUDA graphs and measures "
            "each part differently."
        )


def graphs_counted(
    old: ComparedStart, new: ComparedStart, table: RowsByName
) -> Iterator[Explanation]:
    """Explain how counting CUDA graphs before the KV cache reduces it."""
    if not newly_counts_graphs(old, new):
        return
    size = new.number("cudagraph_bytes")
    before = old.number("cudagraph_bytes")
    text = "Since 0.20 vLLM subtracts its estimate of the CUDA graphs before it sizes the KV cache"
    ending = "; before, they were in addition" + (
        f" ({format_gib(before)} in OLD)" if before else ""
    )
    if size is None:
        yield Explanation(f"{text}{ending}. NEW does not print that estimate.")
    else:
        yield Explanation(f"{text}: {format_gib(size)} less for it{ending}.", -size)


def newly_counts_graphs(old: ComparedStart, new: ComparedStart) -> bool:
    """Return whether only the new start counts CUDA graphs before it sizes the KV cache."""
    on = (
        not new.value("enforce_eager")
        and not new.value("on_cpu")
        and not (old.pool_is_given or new.pool_is_given)
    )
    return on and counts_graphs(old) is False and counts_graphs(new) is True


def counts_graphs(side: ComparedStart) -> bool | None:
    """Return whether the utilization includes a start's CUDA graphs, or None if unknown."""
    return at_least(side, _GRAPHS_COUNTED)


def at_least(side: ComparedStart, version: str) -> bool | None:
    """Return whether the start runs at least that vLLM version.

    Returns None for another engine or an unknown version.
    """
    from packaging.version import InvalidVersion, Version

    own = side.version
    if side.start.framework != "vllm" or own is None:
        return None
    try:
        return Version(Version(own).base_version) >= Version(version)
    except InvalidVersion:
        return None


# A smaller difference is measurement noise.
SMALL_BYTES: Final = 32 * MIB

# Each part of the budget with the settings that change its size.
_MOVED_BY: Final = {
    "weights": (
        "model",
        "dtype",
        "quantization",
        "quantized",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "speculative",
        "speculative_config",
        "lora",
        "enable_lora",
    ),
    "activations": (
        "model",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_model_len",
        "limit_mm_per_prompt",
        "mm_processor_kwargs",
        "multimodal",
        "tensor_parallel_size",
        "enable_lora",
        "enforce_eager",
        "dtype",
    ),
    "CUDA graphs": (
        "enforce_eager",
        "cudagraph_capture_sizes",
        "max_num_seqs",
        "compilation_config",
    ),
    "non-torch": ("tensor_parallel_size", "pipeline_parallel_size"),
    "KV cache of one token": ("model", "kv_cache_dtype", "tensor_parallel_size", "dtype"),
}
_TEXTS: Final = {
    "weights": "The weights take",
    "activations": "The activations of a step take",
    "non-torch": "Memory outside torch takes",
    "CUDA graphs": "The CUDA graphs take",
}


def explain(
    old: ComparedStart, new: ComparedStart, rows: tuple[Row, ...]
) -> tuple[Explanation, ...]:
    """Return the explanations in order.

    The first ones say what makes the starts hard to compare, then the largest effect on the KV
    cache comes first.
    """
    table = {row.name: row for row in rows}
    if different_engines(old, new):
        names = f"{old.start.framework} and {new.start.framework}"
        text = (
            f"{names} are different engines. They measure and name the parts of the "
            "memory differently, so the parts do not compare one by one."
        )
        return (Explanation(text),)
    first = list(engine_generation(old, new))
    found: list[Explanation] = []
    for explainer in _EXPLAINERS:
        found += explainer(old, new, table)
    found.sort(key=lambda e: (e.kv_cache_bytes is None, -abs(e.kv_cache_bytes or 0)))
    return (*first, *found)


def different_engines(old: ComparedStart, new: ComparedStart) -> bool:
    """Return whether the logs come from two engines; an unknown engine counts as the same."""
    names = {old.start.framework, new.start.framework}
    return len(names) == 2 and "unknown" not in names


def not_explained(rows: tuple[Row, ...], explanations: tuple[Explanation, ...]) -> float | None:
    """Return the KV cache's unexplained change in bytes, or None if it is small or unknown."""
    row = {row.name: row for row in rows}.get("KV cache")
    if row is None or not row.changed or row.difference is None:
        return None
    rest = row.difference - sum(e.kv_cache_bytes or 0 for e in explanations)
    if abs(rest) > max(2 * SMALL_BYTES, 3 * row.slack):
        return rest
    return None


def _utilization(
    old: ComparedStart, new: ComparedStart, table: RowsByName
) -> Iterator[Explanation]:
    for name in ("gpu_memory_utilization", "mem_fraction_static"):
        row = table.get(name)
        if row is None or not row.changed or row.difference is None:
            continue
        # SGLang's share applies to the memory that is free before it loads anything.
        if name == "gpu_memory_utilization":
            whole = "device_total_bytes"
        else:
            whole = "initial_free_bytes"
        total = new.number(whole) or old.number(whole)
        if row.kind == "default":
            why = " (the default moved with the version)"
        else:
            why = _who(row)
        text = f"{name} {row.old.value} -> {row.new.value}{why}"
        if row.difference > 0:
            more = "more"
        else:
            more = "less"
        if total is None or (old.pool_is_given or new.pool_is_given):
            yield Explanation(f"{text}: the engine may take {more} of the device.")
        else:
            gain = row.difference * total
            yield Explanation(
                f"{text}: the engine may take {format_gib(abs(gain))} {more} of "
                f"{format_gib(total)}.",
                gain,
            )


def _who(row: Row) -> str:
    set_by = []
    for side, value in (("OLD", row.old), ("NEW", row.new)):
        if value.origin == "set":
            set_by.append(side)
    if set_by:
        return f" (set in {' and '.join(set_by)})"
    return ""


def _device(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    row = table.get("device total")
    if (
        row is None
        or not row.changed
        or row.difference is None
        or abs(row.difference) < SMALL_BYTES
    ):
        return
    was = format_gib(row.old.number or 0)
    now = format_gib(row.new.number or 0)
    share = old.utilization
    if share is None or (old.pool_is_given or new.pool_is_given):
        gain = None
    else:
        gain = row.difference * share
    yield Explanation(f"The device has {now} in NEW, {was} in OLD.", gain)


def _given_pool(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    row = table.get("kv_cache_memory_bytes")
    if row is None or not row.changed:
        return
    was = _given_size(row.old)
    now = _given_size(row.new)
    pool = table.get("KV cache")
    gain = None
    if pool and pool.changed:
        gain = pool.difference
    yield Explanation(f"The KV cache's size is {now} in NEW, {was} in OLD.", gain)


def _given_size(value: ComparedValue) -> str:
    if value.number is None:
        return "left to the utilization"
    return f"{format_gib(value.number)} as the user set it"


def _parts(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    for name, begins in _TEXTS.items():
        row = table.get(name)
        if (
            row is None
            or not row.changed
            or row.difference is None
            or abs(row.difference) < SMALL_BYTES
        ):
            continue
        if name == "CUDA graphs" and newly_counts_graphs(old, new):
            continue
        if row.difference > 0:
            more = "more"
        else:
            more = "less"
        inside = name != "CUDA graphs" or bool(counts_graphs(old))
        if inside and not (old.pool_is_given or new.pool_is_given):
            gain = -row.difference
        else:
            gain = None
        yield Explanation(
            f"{begins} {format_gib(abs(row.difference))} {more}{_because(table, name)}.", gain
        )


def _because(table: RowsByName, part: str) -> str:
    changes = []
    for name in _MOVED_BY.get(part, ()):
        if (row := table.get(name)) is not None and row.changed:
            changes.append(f"{name} {_amount(row, row.old.value)} -> {_amount(row, row.new.value)}")
    if changes:
        return f" ({', '.join(changes)})"
    return ""


def _amount(row: Row, value: object) -> str:
    if value is None:
        return "not set"
    if row.unit == "bytes" and isinstance(value, int):
        return format_gib(value)
    return str(value)


def _suspects(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    """Name parts that only one log prints and whose settings changed."""
    for name, begins in _TEXTS.items():
        row = table.get(name)
        because = _because(table, name)
        if row is None or row.known or not because:
            continue
        silent, other, value = (
            ("NEW", "OLD", row.old) if row.new.value is None else ("OLD", "NEW", row.new)
        )
        size = format_gib(value.number or 0)
        yield Explanation(
            f"{begins} {size} in {other}; {silent} does not print it, but a setting that "
            f"affects it changed{because}."
        )


def _others(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    row = table.get("in use at the start")
    if (
        row is not None
        and row.changed
        and row.difference is not None
        and abs(row.difference) > 4 * SMALL_BYTES
    ):
        was = format_gib(row.old.number or 0)
        now = format_gib(row.new.number or 0)
        if row.difference > 0:
            who = "Another process holds more now"
        else:
            who = "Other processes hold less now"
        yield Explanation(
            f"{who}: {now} of the device was in use before NEW started, {was} before OLD."
        )
    before = old.number("initial_free_bytes")
    after = new.number("initial_free_bytes")
    if before is not None and after is not None and abs(after - before) > 4 * SMALL_BYTES:
        if after < before:
            which = "less"
        else:
            which = "more"
        size, now, was = (format_gib(number) for number in (abs(after - before), after, before))
        yield Explanation(
            f"{size} {which} was free before NEW loaded anything: {now}, {was} in OLD."
        )


def _need(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    row = table.get("KV cache of one full request")
    token = table.get("KV cache of one token")
    length = table.get("max_model_len")
    if row is not None and row.changed and length is not None and length.changed:
        was = format_gib(row.old.number or 0)
        now = format_gib(row.new.number or 0)
        yield Explanation(
            f"One full request needs {now} of KV cache, {was} in OLD (max_model_len "
            f"{length.old.value} -> {length.new.value})."
        )
    if token is not None and token.changed and token.difference and token.old.number:
        times = (token.new.number or 0) / token.old.number
        if abs(times - 1) > 0.05:
            yield Explanation(
                f"A token takes {times:.2g} times the KV "
                f"cache{_because(table, 'KV cache of one token')}."
            )


def _ranks(old: ComparedStart, new: ComparedStart, table: RowsByName) -> Iterator[Explanation]:
    ranks = setting_of(old, "tensor_parallel_size"), setting_of(new, "tensor_parallel_size")
    if all(v.number for v in ranks) and ranks[0].value != ranks[1].value:
        yield Explanation(
            f"The model uses {ranks[1].value} devices instead of {ranks[0].value}; each "
            "number is for one device."
        )


_EXPLAINERS: Final[
    tuple[Callable[[ComparedStart, ComparedStart, RowsByName], Iterator[Explanation]], ...]
] = (
    _given_pool,
    _utilization,
    _device,
    graphs_counted,
    _parts,
    _suspects,
    _others,
    _need,
    _ranks,
)


# Compare two starts: rows, explanations, unknowns, and one summary sentence.

# These failures concern the size of the KV cache.
_OF_THE_POOL = frozenset(
    {"kv_cache_none_left", "kv_cache_too_small_for_max_len", "cpu_node_memory"}
)
_OF_THE_BUDGET = frozenset({"weights", "activations", "non-torch", "CUDA graphs"})
# The comparison lists these rows as missing if a log does not print them.
_NAMED = _OF_THE_BUDGET | {"KV cache", "device total"}


def compare(old: ComparedStart, new: ComparedStart) -> Comparison:
    """Return the changes from ``old`` to ``new``."""
    rows = rows_of(old, new)
    explanations = explain(old, new, rows)
    return Comparison(
        old,
        new,
        _headline(old, new, rows),
        rows,
        explanations,
        tuple(_unknown(old, new, rows, explanations)),
    )


def _headline(old: ComparedStart, new: ComparedStart, rows: tuple[Row, ...]) -> str:
    changed = {}
    for row in rows:
        if row.changed:
            changed[row.name] = row
    what: list[str] = []
    if different_engines(old, new):
        what.append("different engines")
    else:
        what += _largest(changed)
        if new.incident is not None and old.incident is None and new.incident.kind in _OF_THE_POOL:
            what += _margin(old, new)
        elif what and new.incident is not None and old.outcome != new.outcome:
            what.append(f"NEW failed: {new.outcome}")
    if not changed and old.outcome == new.outcome:
        what = ["nothing changed in what the logs print"]
    elif not what:
        what = [_outcomes(old, new, len(changed))]
    return f"{_versions(old, new)}: {'; '.join(what)}"


def _versions(old: ComparedStart, new: ComparedStart) -> str:
    was = old.version
    now = new.version
    if different_engines(old, new):
        return (
            f"{old.start.framework}{f' {was}' if was else ''} -> "
            f"{new.start.framework}{f' {now}' if now else ''}"
        )
    if was is None and now is None:
        return "versions not printed"
    if was == now:
        return f"{now}, both"
    return f"{was or 'version not printed'} -> {now or 'version not printed'}"


def _largest(changed: dict[str, Row]) -> list[str]:
    """Describe the change of the KV cache, or else the largest change of the budget."""
    parts = []
    for part in changed.values():
        if part.kind == "budget" and part.difference:
            parts.append(part)
    row = changed.get("KV cache") or max(
        parts, key=lambda row: abs(row.difference or 0), default=None
    )
    if row is None or row.difference is None:
        return []
    size = format_gib(abs(row.difference), 1 if abs(row.difference) >= 2**29 else 2)
    if row.name == "KV cache":
        return [f"the KV cache {'lost' if row.difference < 0 else 'gained'} {size}"]
    return [f"{row.name} {'+' if row.difference > 0 else '-'}{size}"]


def _margin(old: ComparedStart, new: ComparedStart) -> list[str]:
    """Describe how much more KV cache than one request needs the working start had."""
    pool = old.number("kv_cache_available_bytes")
    needed = old.number("kv_cache_needed_bytes")
    if needed is None and old.value("max_model_len_tokens") == new.value("max_model_len_tokens"):
        needed = new.number("kv_cache_needed_bytes")
    if pool is None or needed is None or pool < needed:
        return []
    return [
        f"the start that worked left {format_gib(pool - needed, 1)} more than one request needs"
    ]


def _outcomes(old: ComparedStart, new: ComparedStart, changes: int) -> str:
    if old.incident is None and new.incident is not None:
        return f"NEW fails: {new.incident.headline}"
    if old.incident is not None and new.incident is None:
        return "NEW works, OLD fails"
    if old.outcome != new.outcome:
        return f"OLD fails with {old.outcome}, NEW with {new.outcome}"
    return (
        f"{changes} {'thing' if changes == 1 else 'things'} changed, but no memory number "
        "that both logs print"
    )


def _unknown(
    old: ComparedStart,
    new: ComparedStart,
    rows: tuple[Row, ...],
    explanations: tuple[Explanation, ...],
) -> list[str]:
    texts = []
    for name, side, key in (("OLD", old, "old"), ("NEW", new, "new")):
        if side.version:
            missing = []
        else:
            missing = ["engine version"]
        for row in rows:
            if row.name in _NAMED and getattr(row, key).origin == "not printed":
                missing.append(row.name)
        if missing:
            texts.append(f"not printed by {name}: {', '.join(missing)}")
        if not side.start.settings_complete:
            texts.append(f"{name} does not list all settings of the user")
        texts += [f"{name}: {note}" for note in side.notes]
    if different_engines(old, new):
        rest = None
    else:
        rest = not_explained(rows, explanations)
    if rest is not None:
        parts = []
        for row in rows:
            if row.name in _OF_THE_BUDGET and not row.known:
                parts.append(row.name)
        if parts:
            where = f"; only one log prints {', '.join(parts)}"
        else:
            where = ""
        texts.append(
            f"both logs' numbers leave {format_gib(abs(rest))} "
            f"{'less' if rest < 0 else 'more'} for the KV cache unexplained{where}"
        )
    return texts


# Select the start of a log, and add the numbers of its failure.

# A start with one of these numbers has more to compare than its version and settings.
_FIGURES: Final = frozenset(
    {
        "model_weights_bytes",
        "peak_activation_bytes",
        "cudagraph_bytes",
        "non_torch_bytes",
        "kv_cache_available_bytes",
        "kv_cache_capacity_tokens",
        "kv_cache_blocks",
        "max_concurrency",
        "kv_cache_needed_bytes",
        "desired_bytes",
    }
)
# A failure's message has these facts of the start. Its other numbers belong to the moment of the
# failure.
_OF_THE_START: Final = _FIGURES | {
    "device_total_bytes",
    "used_before_start_bytes",
    "gpu_memory_utilization_ratio",
    "mem_fraction_static_ratio",
    "max_model_len_tokens",
    "framework_version",
    "model",
    "dtype",
    "tensor_parallel_size",
    "enforce_eager",
    "max_num_seqs",
    "max_num_batched_tokens",
    "on_cpu",
    "kv_cache_pool_bytes",
    "speculative",
    "multimodal",
    "quantized",
    "lora",
}
# An allocator's message alone has some numbers (non-torch) but is not a start.
_TELLS_A_START: Final = frozenset(
    {
        "model_weights_bytes",
        "kv_cache_available_bytes",
        "kv_cache_needed_bytes",
        "kv_cache_capacity_tokens",
        "desired_bytes",
    }
)
LOOKED_FOR: Final = (
    'searched for an engine\'s start-up lines, such as "Initializing a V1 LLM engine (v0.21.0)", '
    '"Available KV cache memory: 4.90 GiB" or "server_args=ServerArgs("'
)


def compared_start(diagnosis: Diagnosis, number: int | None = None) -> ComparedStart:
    """Return one start of a log for a comparison.

    Args:
        diagnosis: the diagnosis of the log.
        number: the start, from 1. None selects the last one with numbers, else the last failed one,
            else the last.

    Raises:
        InputError: the log has no such start.
    """
    name = strip_escapes(diagnosis.source.replace("\n", "\\n")) or "text"
    starts = list(diagnosis.starts) or _of_incidents(diagnosis)
    if not starts:
        raise InputError(f"{name}: the log has no start of an engine", hint=LOOKED_FOR)
    if number is None:
        start = _best_start(diagnosis, starts)
    else:
        found = {start.number: start for start in starts}.get(number)
        if found is None:
            numbers = ", ".join(str(start.number) for start in starts)
            raise InputError(
                f"{name}: the log has no start {number}", hint=f"it has the starts {numbers}"
            )
        start = found
    incident = _failure(diagnosis, start.number)
    return ComparedStart(
        diagnosis.source, _with_failure(start, incident), incident, len(starts), diagnosis.notes
    )


def _failure(diagnosis: Diagnosis, number: int) -> Incident | None:
    """Return the failure that ended a start.

    It is the first out-of-memory failure, else the first incident, else None.
    """
    own = []
    for incident in diagnosis.incidents:
        if incident.start == number:
            own.append(incident)
    for incident in own:
        if incident.is_oom:
            return incident
    return own[0] if own else None


def _best_start(diagnosis: Diagnosis, starts: list[EngineStart]) -> EngineStart:
    """Return the last start with numbers, else the last failed one, else the last."""
    for start in reversed(starts):
        if start.facts.keys() & _FIGURES:
            return start
    for start in reversed(starts):
        if _failure(diagnosis, start.number):
            return start
    return starts[-1]


def _of_incidents(diagnosis: Diagnosis) -> list[EngineStart]:
    """Return the starts that failures imply without a line of the start itself.

    Examples: a message alone, a log without its beginning.
    """
    found: dict[int, EngineStart] = {}
    for incident in diagnosis.incidents:
        number = incident.start
        failure = _failure(diagnosis, number)
        if failure is None or number in found or not incident.facts.keys() & _TELLS_A_START:
            continue
        found[number] = EngineStart(
            number,
            failure.framework,
            failure.framework_version,
            None,
            {},
            failure.settings,
            failure.settings_complete,
        )
    return list(found.values())


def _with_failure(start: EngineStart, incident: Incident | None) -> EngineStart:
    """Add the failure's facts to a start; the start's own printed facts take precedence."""
    facts: dict[str, Fact] = dict(start.facts)
    if incident is not None:
        known = {}
        for name, fact in incident.facts.items():
            if name in _OF_THE_START:
                known[name] = fact
        facts = {**known, **facts}
    _add_capacity(facts, start)
    if incident is not None and start.framework == "unknown":
        framework = incident.framework
    else:
        framework = start.framework
    budget = budget_of_start(facts)
    # A failed start: the rest is not free, the start would have used it.
    if incident is not None:
        reached = {part.name for part in start.budget.parts}
        parts = []
        for part in budget.parts:
            if part.name != "free" or "free" in reached:
                parts.append(part)
        budget = replace(budget, parts=tuple(parts))
    return replace(start, framework=framework, facts=MappingProxyType(facts), budget=budget)


def _add_capacity(facts: dict[str, Fact], start: EngineStart) -> None:
    """Derive tokens, requests and bytes of the KV cache from each other if only some are known."""

    def number(name: str) -> float:
        fact = facts.get(name)
        if fact is None or isinstance(fact.value, (str, bool)):
            return 0.0
        return fact.value

    def solve(name: str, value: float, *sources: str) -> None:
        ratio = sum(facts[source].slack / abs(number(source)) for source in sources)
        if name == "max_concurrency":
            typed = value
        else:
            typed = round(value)
        facts[name] = Fact(name, typed, "solved", ratio * abs(value))

    longest = number("max_model_len_tokens")
    blocks = number("kv_cache_blocks")
    if "kv_cache_capacity_tokens" not in facts and blocks > 0:
        setting = start.settings.get("block_size")
        size = (
            setting.value if setting and isinstance(setting.value, int) else 16
        )  # vLLM's V0 on a GPU
        solve("kv_cache_capacity_tokens", blocks * size, "kv_cache_blocks")
    elif "kv_cache_capacity_tokens" not in facts and number("max_concurrency") > 0 and longest > 0:
        solve("kv_cache_capacity_tokens", number("max_concurrency") * longest, "max_concurrency")
    tokens = number("kv_cache_capacity_tokens")
    pool = number("kv_cache_available_bytes")
    if "max_concurrency" not in facts and tokens > 0 and longest > 0:
        solve("max_concurrency", tokens / longest, "kv_cache_capacity_tokens")
    if "kv_cache_needed_bytes" not in facts and pool > 0 and number("max_concurrency") > 0:
        solve(
            "kv_cache_needed_bytes",
            pool / number("max_concurrency"),
            "kv_cache_available_bytes",
            "max_concurrency",
        )
    if number("kv_cache_needed_bytes") > 0 and longest > 0:
        solve(
            "kv_bytes_per_token", number("kv_cache_needed_bytes") / longest, "kv_cache_needed_bytes"
        )


_STANDARD_INPUT = "-"


def diff(
    old: str | Path | Diagnosis,
    new: str | Path | Diagnosis,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
) -> Comparison:
    """Compare two engine starts: versions, settings, and each part of the memory.

        changes = oomguard.diff("yesterday.log", "today.log")
        for explanation in changes.explanations:
            print(explanation.text)

    Args:
        old: the log of the start that worked: its path, its text, or its Diagnosis. A string is a
            path if a file has that name; otherwise it is the text itself.
        new: the log of the start that failed, in the same forms.
        old_start: the start of ``old``, counted from 1; None selects the last one with numbers.
        new_start: the start of ``new``, in the same way.
        policy: what a plan for the failed start may change; None uses the default.

    Raises:
        InputError: a log is unreadable or has no such start.
        UsageError: a source is not a path, a text or a Diagnosis.
    """
    return compare(_start_of(old, old_start, policy), _start_of(new, new_start, policy))


def diff_logs(
    old: str,
    new: str,
    *,
    old_start: int | None = None,
    new_start: int | None = None,
    policy: Policy | None = None,
    rules: RuleSet | None = None,
) -> Comparison:
    """Compare the logs at two paths like ``diff``; one path may be ``-`` for standard input."""
    if old == new == _STANDARD_INPUT:
        raise UsageError(
            "OLD and NEW are both standard input", hint="give at least one log as a file"
        )
    first = compared_start(_diagnosis_of(old, policy, rules), old_start)
    return compare(first, compared_start(_diagnosis_of(new, policy, rules), new_start))


def _diagnosis_of(path: str, policy: Policy | None, rules: RuleSet | None) -> Diagnosis:
    try:
        with contextlib.closing(
            open_standard_input() if path == _STANDARD_INPUT else open_log(path)
        ) as stream:
            return diagnose_stream(stream, path, rules=rules, policy=policy)
    except OSError as error:
        raise InputError(f"{printable_path(path)}: {error.strerror or error}") from None


def _start_of(source: object, number: int | None, policy: Policy | None) -> ComparedStart:
    if isinstance(source, Diagnosis):
        return compared_start(source, number)
    if isinstance(source, os.PathLike):
        source = Path(source)
    if not isinstance(source, str | Path):
        hint = "the path of a log, its text, or what oomguard.diagnose returns"
        raise UsageError(f"diff expects a log, not {type(source).__name__}", hint=hint)
    diagnosis = diagnose(source, policy=policy)
    one_line = isinstance(source, str) and not diagnosis.source and "\n" not in source
    if one_line and not diagnosis.starts and not diagnosis.incidents:
        hint = "give the path of a log, its text, or what oomguard.diagnose returns"
        raise InputError(
            f"{printable_path(str(source))}: no such file, and not the text of a log", hint=hint
        )
    return compared_start(diagnosis, number)
