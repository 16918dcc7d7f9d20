"""Facts that follow from printed facts by vLLM's memory equation, and the budget they add up to.

``available_kv(u) = total * u - consumed`` with ``consumed`` independent of the utilization ``u``
(vllm/v1/worker/gpu_worker.py determine_available_memory 0.33; cpu_worker.py 0.32 has the same form with the worker's
resident bytes): the slope is the device's total, so a lower utilization always leaves less for the KV cache.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from oomguard.facts import Fact, number_of
from oomguard.incident import Incident
from oomguard.memory.budget import budget_of_failure
from oomguard.memory.explicit_pool import with_explicit_pool
from oomguard.memory.model.name import bits_from_name, bits_of_dtype, parameters_from_name
from oomguard.memory.shares import add_shares
from oomguard.memory.sleeping import with_sleep
from oomguard.memory.static_share import with_static_share
from oomguard.observe.settings_in_force import with_requested_share


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
    if incident.kind == "host_oom":
        incident = _with_host_phase(incident, facts)
    incident = _of_ggml(incident, facts)
    facts["framework"] = Fact("framework", incident.framework, "solved")
    share = facts.get("gpu_memory_utilization_ratio") or facts.get("mem_fraction_static_ratio")
    if share is not None:
        facts.setdefault("device_share_ratio", Fact("device_share_ratio", share.value, share.source))
    add_shares(facts, incident.message)
    _add_named_weights(facts)
    if incident.kind in {"startup_free_memory_below_utilization", "cpu_node_memory"}:
        weights = number("model_weights_bytes") or number("estimated_weights_bytes") or 0.0
        is_above = "on_cpu" not in facts and free is not None and weights > free
        facts["weights_above_free"] = Fact("weights_above_free", is_above, "solved")
    phase = with_sleep(facts, incident, with_static_share(facts, incident.phase))
    facts["phase"] = Fact("phase", phase, "solved")
    return replace(incident, phase=phase, facts=MappingProxyType(facts), budget=budget_of_failure(incident, facts))


def _of_ggml(incident: Incident, facts: dict[str, Fact]) -> Incident:
    """Name Ollama if it runs llama.cpp, and add half of the context, which is a first try."""
    if incident.framework not in {"llama.cpp", "ollama"}:
        return incident
    context, program = number_of(facts, "max_model_len_tokens"), facts.get("run_by")
    if context:
        facts["half_context_tokens"] = Fact("half_context_tokens", int(context) // 2, "solved")
    is_ollama = program is not None and program.value == "ollama"
    return replace(incident, framework="ollama") if is_ollama else incident


def _with_host_phase(incident: Incident, facts: dict[str, Fact]) -> Incident:
    """Name what took the host's memory by the engine's phase, which ends with the last shard of the weights."""
    known = facts.get("host_phase")
    if known is not None and known.value == "loaded":
        del facts["host_phase"]
        return replace(incident, phase="unknown") if incident.phase == "load_weights" else incident
    if incident.phase == "load_weights":
        facts.setdefault("host_phase", Fact("host_phase", "load_weights", "solved"))
    return incident


def _add_named_weights(facts: dict[str, Fact]) -> None:
    """Add the weights of one rank that the model's name and data type tell, where nothing printed them."""
    model, stated = facts.get("model"), facts.get("stated_model")
    parameters = parameters_from_name(str(stated.value)) if stated else None
    if parameters is not None:
        facts["stated_weights_bytes"] = Fact("stated_weights_bytes", round(2 * parameters), "solved", 0.2 * parameters)
    named_bits = bits_from_name(str(model.value)) if model else None
    if named_bits is not None:
        facts.setdefault("quantized", Fact("quantized", True, "solved"))
    parameters = parameters_from_name(str(model.value)) if model else None
    if model is None or parameters is None:
        return
    facts["model_parameters"] = Fact("model_parameters", parameters, "solved", 0.05 * parameters)
    if "expert_parallel" in facts:
        return  # how many ranks share the experts is not known
    ranks = int(facts["tensor_parallel_size"].value) if "tensor_parallel_size" in facts else 1
    dtype = facts.get("dtype")
    quantized = facts.get("quantized")
    bits = named_bits or (4.5 if quantized and quantized.value else None)
    if bits is None and dtype is None and facts["framework"].value == "transformers":
        bits = 32.0  # what transformers before 5.0 loads where no type is named
    bits = bits or bits_of_dtype(str(dtype.value) if dtype else None)
    for name, width in (("estimated_weights_bytes", bits), ("estimated_weights_4bit_bytes", 4.5)):
        size = round(parameters * width / 8 / max(1, ranks))
        facts[name] = Fact(name, size, "solved", 0.1 * size)
