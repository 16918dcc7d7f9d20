"""Choose the start of a log to compare, and add the figures that its failure printed."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomguard.comparing.comparison import ComparedStart
from oomguard.errors import InputError
from oomguard.escapes import strip_escapes
from oomguard.facts import Fact
from oomguard.incident import Diagnosis, EngineStart, Incident
from oomguard.memory.budget import budget_of_start

# A start that printed one of these can be compared by more than its version and settings.
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
# What a failure's message says of the start that it ended; its other figures are of the moment of the failure.
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
# An allocator's message alone has some of the figures (non-torch) and tells no start.
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
    'looked for an engine\'s start-up lines, such as "Initializing a V1 LLM engine (v0.21.0)", '
    '"Available KV cache memory: 4.90 GiB" or "server_args=ServerArgs("'
)


def compared_start(diagnosis: Diagnosis, number: int | None = None) -> ComparedStart:
    """Return one start of a log as it is compared.

    Args:
        diagnosis: the log, diagnosed.
        number: which start, from 1; None takes the last one with figures, else the last that failed, else the last.

    Raises:
        InputError: the log holds no start, or no start of that number.
    """
    name = strip_escapes(diagnosis.source.replace("\n", "\\n")) or "text"
    starts = list(diagnosis.starts) or _of_incidents(diagnosis)
    if not starts:
        raise InputError(f"{name}: no start of an engine in it", hint=LOOKED_FOR)
    if number is None:
        chosen = next((start for start in reversed(starts) if start.facts.keys() & _FIGURES), None)
        failed = None if chosen else next((s for s in reversed(starts) if _failure(diagnosis, s.number)), None)
        start = chosen or failed or starts[-1]
    else:
        found = next((start for start in starts if start.number == number), None)
        if found is None:
            numbers = ", ".join(str(start.number) for start in starts)
            raise InputError(f"{name}: no start {number} in it", hint=f"it holds: {numbers}")
        start = found
    incident = _failure(diagnosis, start.number)
    return ComparedStart(diagnosis.source, _with_failure(start, incident), incident, len(starts), diagnosis.notes)


def _failure(diagnosis: Diagnosis, number: int) -> Incident | None:
    """Return what ended a start: its first out-of-memory, else its first incident, else None."""
    own = [incident for incident in diagnosis.incidents if incident.start == number]
    return next((incident for incident in own if incident.is_oom), own[0] if own else None)


def _of_incidents(diagnosis: Diagnosis) -> list[EngineStart]:
    """Return the starts that failures imply if no line of a start is left: a message alone, a log without its head."""
    numbers = dict.fromkeys(i.start for i in diagnosis.incidents if i.facts.keys() & _TELLS_A_START)
    return [
        EngineStart(n, i.framework, i.framework_version, None, {}, i.settings, i.settings_complete)
        for n in numbers
        if (i := _failure(diagnosis, n)) is not None
    ]


def _with_failure(start: EngineStart, incident: Incident | None) -> EngineStart:
    """Add to a start what its failure says of it; what the start itself printed wins."""
    facts: dict[str, Fact] = dict(start.facts)
    if incident is not None:
        facts = {**{name: fact for name, fact in incident.facts.items() if name in _OF_THE_START}, **facts}
    _add_capacity(facts, start)
    framework = incident.framework if incident is not None and start.framework == "unknown" else start.framework
    budget = budget_of_start(facts)
    if incident is not None:  # a start that failed on its way: the rest is not free, it would have been taken
        reached = {part.name for part in start.budget.parts}
        parts = tuple(part for part in budget.parts if part.name != "free" or part.name in reached)
        budget = replace(budget, parts=parts)
    return replace(start, framework=framework, facts=MappingProxyType(facts), budget=budget)


def _add_capacity(facts: dict[str, Fact], start: EngineStart) -> None:
    """Solve tokens, requests and bytes of the KV cache from each other, if the log prints only some of them."""

    def number(name: str) -> float:
        fact = facts.get(name)
        return 0.0 if fact is None or isinstance(fact.value, (str, bool)) else fact.value

    def solve(name: str, value: float, *sources: str) -> None:
        ratio = sum(facts[source].slack / abs(number(source)) for source in sources)
        typed = value if name == "max_concurrency" else round(value)
        facts[name] = Fact(name, typed, "solved", ratio * abs(value))

    longest, blocks = number("max_model_len_tokens"), number("kv_cache_blocks")
    if "kv_cache_capacity_tokens" not in facts and blocks > 0:
        setting = start.settings.get("block_size")
        size = setting.value if setting and isinstance(setting.value, int) else 16  # vLLM's V0 on a GPU
        solve("kv_cache_capacity_tokens", blocks * size, "kv_cache_blocks")
    elif "kv_cache_capacity_tokens" not in facts and number("max_concurrency") > 0 and longest > 0:
        solve("kv_cache_capacity_tokens", number("max_concurrency") * longest, "max_concurrency")
    tokens, pool = number("kv_cache_capacity_tokens"), number("kv_cache_available_bytes")
    if "max_concurrency" not in facts and tokens > 0 and longest > 0:
        solve("max_concurrency", tokens / longest, "kv_cache_capacity_tokens")
    if "kv_cache_needed_bytes" not in facts and pool > 0 and number("max_concurrency") > 0:
        solve("kv_cache_needed_bytes", pool / number("max_concurrency"), "kv_cache_available_bytes", "max_concurrency")
    if number("kv_cache_needed_bytes") > 0 and longest > 0:
        solve("kv_bytes_per_token", number("kv_cache_needed_bytes") / longest, "kv_cache_needed_bytes")
