"""What happened, in one sentence with both numbers, by kind; the table is data."""

from __future__ import annotations

from typing import Final

from oomguard.facts import render
from oomguard.incident import Incident

# The first template whose facts are all known is used; the last of each kind needs none.
_TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "kv_cache_too_small_for_max_len": (
        "One request needs {kv_cache_needed_bytes:GiB} of KV cache, {kv_cache_pool_bytes|kv_cache_available_bytes:GiB} is there",
        "One request does not fit in the KV cache: {max_model_len_tokens} tokens wanted, {kv_cache_capacity_tokens} fit",
    ),
    "kv_cache_none_left": (
        "No memory is left for the KV cache: {kv_cache_available_bytes:GiB} at utilization {gpu_memory_utilization_ratio}",
        "No memory is left for the KV cache",
    ),
    "cpu_node_memory": (
        "No memory is left for the KV cache: {kv_cache_available_bytes:GiB} of the {desired_bytes:GiB} that the utilization allows",
        "vLLM wants {desired_bytes:GiB} of the node's memory at start-up, {device_free_bytes:GiB} of {device_total_bytes:GiB} is free",
        "A KV cache of {kv_cache_requested_bytes:GiB} was asked for, {device_free_bytes:GiB} of {device_total_bytes:GiB} is free",
    ),
    "startup_free_memory_below_utilization": (
        "vLLM wants {desired_bytes:GiB} at start-up, {device_free_bytes:GiB} of {device_total_bytes:GiB} is free",
    ),
    "cuda_oom": (
        "CUDA out of memory: {tried_bytes:GiB} asked for, {device_free_bytes:GiB} of {device_total_bytes:GiB} free",
        "CUDA out of memory: the process holds {process_in_use_bytes:GiB}",
    ),
    "engine_dead": ("The engine died; its cause is not in this text",),
}


def headline(incident: Incident) -> str:
    """One sentence that says what happened, with the figures that are known."""
    for template in _TEMPLATES.get(incident.kind, ()):
        text = render(template, incident.facts)
        if "unknown" not in text:
            return text
    return incident.kind.replace("_", " ")
