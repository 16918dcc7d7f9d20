"""List the kinds of memory failure with their headlines, in the order of the JSON contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oomguard.core.facts import Fact
from oomguard.core.text import PLACEHOLDER, first_known, is_known

# What an allocator prints, most informative first: the request with free memory, the request with
# used memory, the request alone.
_ALLOCATION: Final = (
    "{tried_bytes:GiB} requested, {device_free_bytes:GiB} of {device_total_bytes:GiB} free",
    (
        "{tried_bytes:GiB} requested, {process_in_use_bytes|allocated_bytes:GiB} of "
        "{device_total_bytes:GiB} in use"
    ),
    "{tried_bytes:GiB} requested, {device_free_bytes:GiB} free",
    "{tried_bytes:GiB} requested",
    "the process holds {process_in_use_bytes:GiB}",
)


def _allocator(what: str) -> tuple[str, ...]:
    return (*(f"{what}: {figures}" for figures in _ALLOCATION), what)


# Kind -> templates. oomguard uses the first template whose facts are all known. The last template
# of a kind needs no facts; a kind without templates is shown by its name.
_HEADLINES: Final[dict[str, tuple[str, ...]]] = {
    "cuda_oom": _allocator("CUDA out of memory"),
    "hip_oom": _allocator("HIP out of memory"),
    "xpu_oom": _allocator("XPU out of memory"),
    "npu_oom": _allocator("NPU out of memory"),
    "mps_oom": _allocator("MPS out of memory"),
    "xla_oom": _allocator("XLA out of memory"),
    "cublas_alloc": _allocator("cuBLAS could not get memory for its handle or workspace"),
    "nccl_oom": _allocator("NCCL could not get memory"),
    "kv_cache_none_left": (
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} more than utilization "
            "{gpu_memory_utilization_ratio} allows"
        ),
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} too much"
        ),
        "No memory is left for the KV cache",
    ),
    "kv_cache_too_small_for_max_len": (
        (
            "One request of {max_model_len_tokens:count} tokens needs {kv_cache_needed_bytes:GiB} "
            "of KV cache, but {kv_cache_pool_bytes|kv_cache_available_bytes:GiB} is available"
        ),
        (
            "One request needs {kv_cache_needed_bytes:GiB} of KV cache, "
            "but {kv_cache_pool_bytes|kv_cache_available_bytes:GiB} is available"
        ),
        (
            "One request of {max_model_len_tokens:count} tokens does not fit in the KV cache, "
            "which holds {kv_cache_capacity_tokens:count} tokens"
        ),
        "One request of the full length does not fit in the KV cache",
    ),
    "startup_free_memory_below_utilization": (
        (
            "vLLM wants {desired_bytes:GiB} at start-up, but {device_free_bytes:GiB} of "
            "{device_total_bytes:GiB} is free"
        ),
        "vLLM wants more memory at start-up than is free",
    ),
    "sampler_warmup_oom": (
        "Memory ran out while warming up the sampler with {max_num_seqs} sequences",
        *_allocator("Memory ran out while warming up the sampler"),
    ),
    "pooler_warmup_oom": (
        "Memory ran out while warming up the pooler with {max_num_seqs} sequences",
        *_allocator("Memory ran out while warming up the pooler"),
    ),
    "cudagraph_capture_oom": _allocator("Memory ran out while capturing CUDA graphs"),
    "memory_profiling_changed": (
        (
            "Free memory changed while vLLM was measuring: {initial_free_bytes:GiB} before, "
            "{current_free_bytes:GiB} after"
        ),
        "Free memory changed while vLLM was measuring",
    ),
    "cpu_node_memory": (
        (
            "No memory is left for the KV cache: everything else needs "
            "{kv_cache_available_bytes:excess} more than the {desired_bytes:GiB} that the "
            "utilization allows"
        ),
        (
            "vLLM wants {desired_bytes:GiB} of the node's memory at start-up, but "
            "{device_free_bytes:GiB} "
            "of {device_total_bytes:GiB} is free"
        ),
        (
            "A KV cache of {kv_cache_requested_bytes:GiB} was requested, but "
            "{device_free_bytes:GiB} of "
            "{device_total_bytes:GiB} is free"
        ),
        "The node's memory is too small for what vLLM asks for",
    ),
    "mamba_cache_blocks": (
        "Too few Mamba cache blocks for {max_num_seqs} sequences",
        "Too few Mamba cache blocks",
    ),
    "encoder_budget": ("One item needs more encoder tokens than the budget allows",),
    "kv_slots_exhausted": (
        (
            "Too few places in the table of requests: {request_slots_needed} requested, "
            "{request_slots_free} free"
        ),
        "No KV cache slot is left for a request",
    ),
    "llamacpp_oom": (*_allocator("{framework} ran out of memory"), "llama.cpp ran out of memory"),
    "host_oom": (
        (
            "Stopped before host memory ran out: {host_available_bytes:GiB} of the limit of "
            "{host_limit_bytes:GiB} was left, the reserve is {host_reserve_bytes:GiB}"
        ),
        (
            "Stopped before host memory ran out: {host_available_bytes:GiB} of "
            "{host_total_bytes:GiB} was left, the reserve is {host_reserve_bytes:GiB}"
        ),
        "Host memory ran out: {host_used_bytes:GiB} of {host_total_bytes:GiB} in use",
        (
            "Host memory ran out: {host_victim} had {host_victim_bytes:GiB}, the limit was "
            "{host_limit_bytes:GiB}"
        ),
        "Host memory ran out: the limit was {host_limit_bytes:GiB}",
        "Too little host memory: {tried_bytes:GiB} requested, {host_available_bytes:GiB} available",
        "Host memory ran out: {tried_bytes:GiB} requested",
        "Host memory ran out: {host_victim} was ended with {host_victim_bytes:GiB}",
        "Host memory ran out: {host_victim} was ended",
        "The host ran out of memory",
    ),
    "engine_dead": (
        "The engine died: {engine_error}",
        "A process of the engine was killed by {exit_signal:signal}",
        "The engine died, and this text does not show why",
    ),
    "other": (),
}
KINDS: Final = tuple(_HEADLINES)
# Free memory rose, a token budget is too small, or the text shows no cause. oomguard reports these
# kinds, but no process ran out of memory.
NOT_OOM_KINDS: Final = frozenset({"memory_profiling_changed", "encoder_budget", "engine_dead"})
# Of these kinds, a change of settings can still cure some.
CURABLE_KINDS: Final = frozenset(KINDS) - NOT_OOM_KINDS | {"encoder_budget"}


def headline(kind: str, facts: Mapping[str, Fact]) -> str:
    """Return one sentence that says what happened, with the known figures.

    Args:
        kind: one of ``KINDS``; any other kind is shown by its name.
        facts: the printed facts of the failure.
    """
    return first_known(_HEADLINES.get(kind, ()), facts) or kind.replace("_", " ")


def facts_of_headline(kind: str, facts: Mapping[str, Fact]) -> list[str]:
    """Return the names of the facts whose figures the headline shows, in its order."""
    template = next((text for text in _HEADLINES.get(kind, ()) if is_known(text, facts)), "")
    names: list[str] = []
    for found in PLACEHOLDER.finditer(template):
        names += [name for name in found.group(1).split("|") if name in facts][:1]
    return names
