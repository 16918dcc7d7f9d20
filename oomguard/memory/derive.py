"""Facts that follow from printed facts by vLLM's memory equation, and the budget they add up to.

``available_kv(u) = total * u - consumed`` with ``consumed`` independent of the utilization ``u``
(vllm/v1/worker/gpu_worker.py determine_available_memory 0.33; cpu_worker.py 0.32 has the same form with the worker's
resident bytes): the slope is the device's total, so a lower utilization always leaves less for the KV cache.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import Budget, BudgetPart, Incident
from oomguard.memory.kv_cache import kv_bytes_per_token
from oomguard.memory.model_config import read_model_config

_PARTS: Final = (
    ("model_weights_bytes", "weights"), ("peak_activation_bytes", "activations"), ("cudagraph_bytes", "CUDA graphs"),
    ("allocated_bytes", "tensors"), ("reserved_unallocated_bytes", "reserved by torch, unused"),
    ("non_torch_bytes", "non-torch"), ("other_process_in_use_bytes", "other processes"), ("consumed_bytes", "in use before the KV cache"),
    ("used_before_start_bytes", "in use before the engine started"), ("device_free_bytes", "free"),
)  # fmt: skip


def derive(incident: Incident, *, local_models: bool = False) -> Incident:
    """The incident with every fact that follows from its printed ones, and with its budget.

    ``local_models`` also reads the configuration of a model folder that the log names: right for a run of this
    moment, wrong for a saved log, which may come from another machine.
    """
    facts = dict(incident.facts)

    def number(name: str) -> float | None:
        fact = facts.get(name)
        return None if fact is None or isinstance(fact.value, (str, bool)) else fact.value

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
    if local_models:
        _add_kv_need(facts)
    return replace(incident, facts=MappingProxyType(facts), budget=_budget(facts))


def _add_kv_need(facts: dict[str, Fact]) -> None:
    """KV need of one request of the full length, from the model's own configuration, where the log names a local folder."""
    model, tokens = facts.get("model"), facts.get("max_model_len_tokens")
    if model is None or tokens is None or "kv_cache_needed_bytes" in facts:
        return
    config = read_model_config(str(model.value))
    if config is None:
        return
    ranks = facts.get("tensor_parallel_size")
    per_token = kv_bytes_per_token(config, int(ranks.value) if ranks else 1)
    facts["kv_bytes_per_token"] = Fact("kv_bytes_per_token", per_token, "config")


def _budget(facts: dict[str, Fact]) -> Budget:
    total = facts.get("device_total_bytes")
    sizes = {
        name: int(fact.value)
        for name, fact in facts.items()
        if name.endswith("_bytes") and not isinstance(fact.value, str)
    }
    if "consumed_bytes" in sizes:  # what is in use before the KV cache contains these
        sizes["consumed_bytes"] -= sum(
            sizes.get(n, 0) for n in ("model_weights_bytes", "peak_activation_bytes", "non_torch_bytes")
        )
    parts = [BudgetPart(label, sizes[name], facts[name].source) for name, label in _PARTS if sizes.get(name, 0) > 0]
    return Budget(int(total.value) if total else None, tuple(parts))
