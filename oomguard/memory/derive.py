"""Facts that follow from printed facts by vLLM's memory equation, and the budget they add up to.

``available_kv(u) = total * u - consumed`` with ``consumed`` independent of the utilization ``u``
(vllm/v1/worker/gpu_worker.py determine_available_memory 0.33; cpu_worker.py 0.32 has the same form with the worker's
resident bytes): the slope is the device's total, so a lower utilization always leaves less for the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomguard.facts import Fact, number_of
from oomguard.incident import Budget, BudgetPart, Incident
from oomguard.memory.explicit_pool import with_explicit_pool
from oomguard.memory.model.name import bits_from_name, bits_of_dtype, parameters_from_name
from oomguard.memory.shares import add_shares
from oomguard.memory.sleeping import with_sleep
from oomguard.memory.static_share import with_static_share
from oomguard.observe.settings_in_force import with_requested_share

_PARTS: Final = (
    ("model_weights_bytes", "weights"),
    ("peak_activation_bytes", "activations"),
    ("cudagraph_bytes", "CUDA graphs"),
    ("allocated_bytes", "tensors"),
    ("reserved_unallocated_bytes", "reserved by torch, unused"),
    ("non_torch_bytes", "non-torch"),
    ("other_process_in_use_bytes", "other processes"),
    ("consumed_bytes", "in use before the KV cache"),
    ("used_before_start_bytes", "in use before the engine started"),
    ("device_free_bytes", "free"),
)


def derive(incident: Incident) -> Incident:
    """Return the incident with every fact that follows from its printed ones, and with its budget."""
    incident = with_explicit_pool(incident)
    facts = with_requested_share(incident.facts)  # a total that is given meets a request that is printed only here
    total_fact = facts.get("device_total_bytes")
    if total_fact is not None and not isinstance(total_fact.value, str) and total_fact.value < 0:
        del facts["device_total_bytes"]  # an underflow or a damaged line: no device is that small, no share follows

    def number(name: str) -> float | None:
        return number_of(facts, name)

    def slack(*names: str) -> float:
        return sum(facts[name].slack for name in names if name in facts)

    total, ratio = number("device_total_bytes"), number("gpu_memory_utilization_ratio")
    available, desired, free = number("kv_cache_available_bytes"), number("desired_bytes"), number("device_free_bytes")
    if desired is None and total is not None and ratio is not None:
        desired = total * ratio
    if desired is not None and available is not None and available <= 0:
        facts["consumed_bytes"] = Fact(
            "consumed_bytes", round(desired - available), "solved", slack("desired_bytes", "kv_cache_available_bytes")
        )
        if total:
            facts["break_even_utilization_ratio"] = Fact(
                "break_even_utilization_ratio", (desired - available) / total, "solved"
            )
    if available is not None and available < 0 and ratio is not None and ratio < 1:
        smallest = -available / (1 - ratio)
        facts["smallest_helpful_device_bytes"] = Fact("smallest_helpful_device_bytes", round(smallest), "solved")
    if (
        incident.kind in {"startup_free_memory_below_utilization", "cpu_node_memory"}
        and available is None
        and total
        and free is not None
    ):
        facts["used_before_start_bytes"] = Fact("used_before_start_bytes", round(total - free), "solved")
    pool = number("kv_cache_memory_bytes")
    if pool is not None and incident.kind == "kv_cache_too_small_for_max_len":
        facts["kv_cache_pool_bytes"] = Fact("kv_cache_pool_bytes", int(pool), facts["kv_cache_memory_bytes"].source)
    if pool is not None or ("num_gpu_blocks_override" in facts and incident.kind != "cpu_node_memory"):
        facts.setdefault("kv_cache_is_fixed", Fact("kv_cache_is_fixed", True, "solved"))  # no share decides its size
    early = "profiling_frames" in facts or incident.phase == "load_weights"
    if early and "tried_bytes" in facts and incident.framework == "vllm":
        facts["before_kv_cache"] = Fact("before_kv_cache", True, "solved")  # no share is filled yet
    facts["framework"] = Fact("framework", incident.framework, "solved")
    share = facts.get("gpu_memory_utilization_ratio") or facts.get("mem_fraction_static_ratio")
    if share is not None:
        facts.setdefault("device_share_ratio", Fact("device_share_ratio", share.value, share.source))
    add_shares(facts)
    _add_named_weights(facts)
    phase = with_sleep(facts, incident, with_static_share(facts, incident.phase))
    facts["phase"] = Fact("phase", phase, "solved")
    return replace(incident, phase=phase, facts=MappingProxyType(facts), budget=_budget(facts))


def _add_named_weights(facts: dict[str, Fact]) -> None:
    """Add the weights of one rank that the model's name and data type tell, where nothing printed them."""
    model, stated = facts.get("model"), facts.get("stated_model")
    parameters = parameters_from_name(str(stated.value)) if stated else None
    if parameters is not None:
        facts["stated_weights_bytes"] = Fact("stated_weights_bytes", round(2 * parameters), "solved", 0.2 * parameters)
    parameters = parameters_from_name(str(model.value)) if model else None
    if model is None or parameters is None:
        return
    ranks = int(facts["tensor_parallel_size"].value) if "tensor_parallel_size" in facts else 1
    dtype = facts.get("dtype")
    quantized = facts.get("quantized")
    bits = bits_from_name(str(model.value)) or (4.5 if quantized and quantized.value else None)
    if bits is None and dtype is None and facts["framework"].value == "transformers":
        bits = 32.0  # what transformers before 5.0 loads where no type is named
    bits = bits or bits_of_dtype(str(dtype.value) if dtype else None)
    facts["model_parameters"] = Fact("model_parameters", parameters, "solved", 0.05 * parameters)
    for name, width in (("estimated_weights_bytes", bits), ("estimated_weights_4bit_bytes", 4.5)):
        size = round(parameters * width / 8 / max(1, ranks))
        facts[name] = Fact(name, size, "solved", 0.1 * size)


_START_PARTS: Final = (
    ("model_weights_bytes", "weights"),
    ("peak_activation_bytes", "activations"),
    ("cudagraph_bytes", "CUDA graphs"),
    ("kv_cache_available_bytes", "KV cache"),
    ("non_torch_bytes", "non-torch"),
)


def budget_of_start(facts: Mapping[str, Fact]) -> Budget:
    """Return where an engine's start put the device's bytes, as far as it printed them; the rest of the device is free."""
    sizes = {
        name: int(fact.value)
        for name, fact in facts.items()
        if name.endswith("_bytes") and not isinstance(fact.value, str)
    }
    consumed, weights = sizes.get("consumed_bytes"), sizes.get("model_weights_bytes")
    if consumed is not None and weights is not None and "non_torch_bytes" not in sizes and consumed >= weights:
        sizes["non_torch_bytes"] = consumed - weights  # 0.27 and later print the two together
    parts = [
        BudgetPart(label, sizes[name], facts[name].source if name in facts else "solved")
        for name, label in _START_PARTS
        if sizes.get(name, 0) > 0
    ]
    total, before, after = (sizes.get(n) for n in ("device_total_bytes", "device_free_bytes", "current_free_bytes"))
    if total is not None and before is not None and total > before:  # a start prints what was free when it began
        parts.append(BudgetPart("in use before the engine started", total - before, "solved"))
    if after is not None:  # SGLang prints what is left when it is ready
        parts.append(BudgetPart("free", after, facts["current_free_bytes"].source))
    elif total is not None and {"weights", "KV cache"} <= {part.name for part in parts}:
        free = total - sum(part.bytes for part in parts)
        parts += [BudgetPart("free", free, "solved")] if free > 0 else []
    return Budget(total, tuple(parts))


def _budget(facts: dict[str, Fact]) -> Budget:
    total = facts.get("device_total_bytes")
    sizes = {
        name: int(fact.value)
        for name, fact in facts.items()
        if name.endswith("_bytes") and not isinstance(fact.value, str)
    }
    own, listed = sizes.get("own_bytes"), sizes.get("other_process_in_use_bytes")
    if listed is not None and listed == own:
        del sizes["other_process_in_use_bytes"]  # it is the failed process, which says of itself what cannot be
    elif listed is None and total is not None and sizes.get("others_bytes", 0) > 0.2 * max(0, int(total.value)):
        sizes["other_process_in_use_bytes"] = sizes["others_bytes"]  # more than this process's own context can be
    if "consumed_bytes" in sizes:  # what is in use before the KV cache contains these
        sizes["consumed_bytes"] -= sum(
            sizes.get(n, 0) for n in ("model_weights_bytes", "peak_activation_bytes", "non_torch_bytes")
        )
    parts = [
        BudgetPart(label, sizes[name], facts[name].source if name in facts else "solved")
        for name, label in _PARTS
        if sizes.get(name, 0) > 0
    ]
    return Budget(int(total.value) if total else None, tuple(parts))
