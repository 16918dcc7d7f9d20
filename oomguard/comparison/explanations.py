"""Explain a change in sentences with bytes from numbers that the logs print or imply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from oomguard.comparison.comparison import ComparedStart, Explanation, Row, RowsByName
from oomguard.comparison.table import setting_of
from oomguard.core.facts import MIB, format_gib

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
    found = [e for explainer in _EXPLAINERS for e in explainer(old, new, table)]
    found.sort(key=lambda e: (e.kv_cache_bytes is None, -abs(e.kv_cache_bytes or 0)))
    return (*first, *found)


def different_engines(old: ComparedStart, new: ComparedStart) -> bool:
    """Return whether the logs come from two engines; an unknown engine counts as the same."""
    names = {old.start.framework, new.start.framework}
    return len(names) == 2 and "unknown" not in names


def not_explained(rows: tuple[Row, ...], explanations: tuple[Explanation, ...]) -> float | None:
    """Return the KV cache's unexplained change in bytes, or None if it is small or unknown."""
    row = next((row for row in rows if row.name == "KV cache" and row.changed), None)
    if row is None or row.difference is None:
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
    set_by = [side for side, value in (("OLD", row.old), ("NEW", row.new)) if value.origin == "set"]
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
    was, now = (
        "left to the utilization"
        if v.number is None
        else f"{format_gib(v.number)} as the user set it"
        for v in (row.old, row.new)
    )
    pool = table.get("KV cache")
    yield Explanation(
        f"The KV cache's size is {now} in NEW, {was} in OLD.",
        pool.difference if pool and pool.changed else None,
    )


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
    changes = [
        f"{name} {_amount(row, row.old.value)} -> {_amount(row, row.new.value)}"
        for name in _MOVED_BY.get(part, ())
        if (row := table.get(name)) is not None and row.changed
    ]
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
