"""Facts: the values that oomguard reasons over, each named and typed by the registry, and told
where it is from.

A figure an engine printed is rounded: ``slack`` holds half of its last digit, in the fact's own
unit, so that solvers can stay on the safe side of the rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from oomguard.core.errors import SettingError
from oomguard.core.records import Record

# The closed registry of facts: the name, the type and the meaning of every value that oomguard
# reasons over.
#
# A fact's unit is the end of its name: ``_bytes`` (int), ``_tokens`` (int), ``_ratio`` (float, 0 to
# 1), no suffix for counts, text and yes/no.

FactType = Literal["int", "float", "bool", "str"]
FactValue = int | float | bool | str


@dataclass(frozen=True, slots=True)
class FactSpec:
    """What the registry knows of one fact: its type and its meaning in one sentence."""

    name: str
    type: FactType
    meaning: str


def _specs() -> dict[str, FactSpec]:
    rows: list[tuple[str, FactType, str]] = [
        # the allocator
        ("tried_bytes", "int", "what the failed allocation asked for"),
        ("device_total_bytes", "int", "total memory of the device"),
        ("device_free_bytes", "int", "free memory of the device when it failed"),
        (
            "process_in_use_bytes",
            "int",
            "device memory held by the failing process, torch's and other",
        ),
        (
            "other_process_in_use_bytes",
            "int",
            "device memory held by other processes that the message names",
        ),
        ("allocated_bytes", "int", "memory in live tensors of the process"),
        ("allowed_bytes", "int", "the cap that a memory fraction puts on the process"),
        ("reserved_total_bytes", "int", "memory that torch's caching allocator holds"),
        ("reserved_unallocated_bytes", "int", "memory that torch holds and no tensor uses"),
        ("private_pool_bytes", "int", "memory in private pools, CUDA graphs for example"),
        ("non_torch_bytes", "int", "device memory of the process outside torch's allocator"),
        ("gpu_index", "int", "index of the device in the message"),
        (
            "allocator_variable",
            "str",
            "environment variable that the message names for the allocator's options",
        ),
        ("torch_version", "str", "version of torch, as the log prints it"),
        (
            "program_arguments_bytes",
            "int",
            "what a compiled program takes as its arguments: weights, cache and inputs",
        ),
        (
            "program_bytes",
            "int",
            "what a compiled program needs beside its arguments: its temporaries",
        ),
        (
            "free_blocks_bytes",
            "int",
            "free blocks, together, of the segments that the failed allocation could use",
        ),
        ("largest_free_block_bytes", "int", "the largest of these blocks"),
        (
            "waiting_blocks_bytes",
            "int",
            "blocks of these segments that were freed and waited for another stream",
        ),
        ("largest_holder", "str", "the code that allocated most of what was in use"),
        ("largest_holder_bytes", "int", "what of it was in use"),
        # vLLM
        ("kv_cache_needed_bytes", "int", "KV cache that one request of max_model_len tokens needs"),
        (
            "kv_cache_available_bytes",
            "int",
            "memory left for the KV cache; negative if the rest takes too much",
        ),
        ("kv_cache_capacity_tokens", "int", "tokens that fit in the KV cache"),
        ("kv_cache_requested_bytes", "int", "KV cache size that was asked for"),
        (
            "kv_cache_pool_bytes",
            "int",
            "size of the KV cache as the user set it, exact where a printed one is rounded",
        ),
        ("kv_bytes_per_token", "int", "KV cache bytes of one token over all layers of one rank"),
        ("kv_cache_block_bytes", "int", "one block of the KV cache over all layers of one rank"),
        (
            "kv_cache_needed_blocks",
            "int",
            "KV blocks for one request of max_model_len tokens and the engine's own one",
        ),
        (
            "kv_cache_fitting_blocks",
            "int",
            "KV blocks that the memory holds where no number of them is set",
        ),
        (
            "kv_cache_is_fixed",
            "bool",
            "bytes or blocks set the size of the KV cache, so no share decides it",
        ),
        ("num_gpu_blocks_override", "int", "number of KV blocks that the user set"),
        (
            "fitting_block_tokens",
            "int",
            "block_size, less than was set, with which the KV cache holds a request",
        ),
        (
            "overridden_kv_cache_bytes",
            "int",
            "KV cache size that was set too; an environment variable overrides it",
        ),
        ("fits_without_cached_prefixes", "bool", "one request fits where no prefixes are cached"),
        ("explicit_kv_cache_bytes", "int", "KV cache size set in bytes, as the engine prints it"),
        ("ignored_kv_cache_bytes", "int", "KV cache size that was set and has no effect"),
        (
            "fitting_step_tokens",
            "int",
            "max_num_batched_tokens with which one request of the full length fits",
        ),
        ("max_model_len_tokens", "int", "longest request, prompt and answer together"),
        (
            "estimated_max_model_len_tokens",
            "int",
            "longest request that fits, as the engine printed it",
        ),
        ("gpu_memory_utilization_ratio", "float", "share of the device that vLLM may use"),
        ("desired_bytes", "int", "device memory that the utilization asks for"),
        ("max_num_seqs", "int", "sequences scheduled together at most"),
        ("max_num_batched_tokens", "int", "tokens scheduled in one step at most"),
        ("model_weights_bytes", "int", "memory of the loaded weights"),
        ("peak_activation_bytes", "int", "transient peak while profiling"),
        ("cudagraph_bytes", "int", "memory of captured CUDA graphs"),
        (
            "graphs_not_counted",
            "bool",
            "the engine keeps no room for CUDA graphs before it captures them",
        ),
        ("initial_free_bytes", "int", "free device memory before profiling"),
        ("current_free_bytes", "int", "free device memory after profiling"),
        ("consumed_bytes", "int", "device memory in use apart from the KV cache"),
        (
            "break_even_utilization_ratio",
            "float",
            "utilization that leaves no KV cache; above 1: none helps",
        ),
        (
            "smallest_helpful_device_bytes",
            "int",
            "device size from which some utilization up to 1.0 helps",
        ),
        (
            "weights_above_free",
            "bool",
            "the weights of a rank, as printed or by name, are more than is free",
        ),
        ("asked_input_tokens", "int", "prompt length that the command itself asks for"),
        ("asked_output_tokens", "int", "answer length that the command itself asks for"),
        (
            "used_before_start_bytes",
            "int",
            "device memory that others held before the engine started",
        ),
        ("numa_node", "int", "NUMA node that the CPU backend is bound to"),
        ("tensor_parallel_size", "int", "ranks that share each layer"),
        ("model", "str", "model name or folder as the engine printed it"),
        ("architecture", "str", "model class that the engine resolved"),
        ("dtype", "str", "data type of the weights"),
        ("framework_version", "str", "version that the engine printed"),
        (
            "step_requests",
            "str",
            "requests in the step that failed, each with its tokens, as the engine dumped them",
        ),
        ("step_tokens", "int", "tokens of all requests in the step that failed"),
        ("on_cpu", "bool", "the engine runs on its CPU backend"),
        ("prompt_logprobs", "bool", "log-probabilities of prompt tokens were asked for"),
        (
            "scores_prompts",
            "bool",
            "the text says that prompts are scored: their log-probabilities or their perplexity",
        ),
        ("prefix_caching", "bool", "prefix caching is on"),
        ("whole_prompts", "bool", "a step holds whole prompts: chunked prefill is off"),
        ("multimodal", "bool", "the model takes images, audio or video"),
        ("enforce_eager", "bool", "CUDA graphs are off"),
        ("loaded_free_bytes", "int", "free device memory once the weights are loaded"),
        (
            "static_share_least_ratio",
            "float",
            "what the loaded weights take of the memory that was free before them",
        ),
        (
            "static_share_holds_weights",
            "bool",
            "the share for weights and KV cache is above what the weights take",
        ),
        ("pool_free_bytes", "int", "free device memory once the KV cache was allocated"),
        ("launch_shown", "bool", "the command that started the engine is shown"),
        ("data_parallel_size", "int", "ranks that take requests of their own"),
        (
            "parallel_attention",
            "bool",
            "each of these ranks computes the attention of its own requests",
        ),
        ("block_size_tokens", "int", "tokens of a block, or page, of the KV cache"),
        (
            "mem_fraction_static_ratio",
            "float",
            "share of the device that SGLang may use for weights and KV cache",
        ),
        ("mamba_cache_blocks", "int", "state blocks that fit, one for each running sequence"),
        ("mamba_blocks_per_request", "int", "state blocks that a running request takes"),
        ("mamba_block_bytes", "int", "memory of one state block"),
        (
            "mamba_full_memory_ratio",
            "float",
            "memory for states as a multiple of that for the KV cache",
        ),
        (
            "swa_full_tokens_ratio",
            "float",
            "tokens that layers of sliding windows hold, as a share of the others'",
        ),
        ("max_total_tokens", "int", "tokens of the KV cache that the user set"),
        (
            "hicache_size",
            "int",
            "host memory for the KV cache's second level, a rank, in 10^9 bytes",
        ),
        (
            "hicache_ratio",
            "float",
            "host memory for the KV cache's second level as a multiple of the device's pool",
        ),
        ("cuda_graph_max_bs", "int", "largest batch that a CUDA graph is captured for"),
        (
            "prefill_graphs",
            "bool",
            "CUDA graphs of prompts were being captured, not those of decoding",
        ),
        (
            "graph_sizes",
            "str",
            "batches that CUDA graphs are captured for, as the engine lists them",
        ),
        (
            "graphs_captured",
            "int",
            "CUDA graphs that were captured when memory ran out, the largest first",
        ),
        ("graphs_wanted", "int", "CUDA graphs that were to be captured"),
        ("graphs_free_bytes", "int", "free device memory when their capture began"),
        ("image_tokens", "int", "tokens of one image of the largest size"),
        ("encoder_item_tokens", "int", "tokens of one image, audio or video"),
        ("encoder_budget_tokens", "int", "tokens that the encoder may take in one step"),
        ("kv_slots_needed_tokens", "int", "KV cache tokens that a step asked for"),
        ("kv_slots_free_tokens", "int", "KV cache tokens that were free"),
        (
            "window_slots_free_tokens",
            "int",
            "tokens that were free in the pool of layers with a sliding window",
        ),
        (
            "running_requests",
            "int",
            "requests that ran together in the last step that the engine told of",
        ),
        ("kv_cache_used_tokens", "int", "KV cache tokens that they held then"),
        (
            "request_slots_free",
            "int",
            "places for requests that were free in the engine's table of them",
        ),
        ("request_slots_needed", "int", "places that a batch of requests asked for"),
        (
            "max_concurrency",
            "float",
            "requests of the full length that the KV cache holds together",
        ),
        ("kv_cache_blocks", "int", "blocks of the KV cache"),
        ("speculative", "bool", "a draft model or other speculation is on"),
        ("lora", "bool", "LoRA adapters are on"),
        ("quantized", "bool", "the weights are quantised"),
        (
            "run_by",
            "str",
            "the program whose user cannot change the call that failed, or that runs llama.cpp",
        ),
        ("half_context_tokens", "int", "half of the context's tokens"),
        ("expert_parallel", "bool", "the experts are spread over the ranks"),
        (
            "engines_built",
            "int",
            "engines that the program builds one after the other in one process",
        ),
        # what the lines beside a failure tell, and what follows from all of it
        ("phase", "str", "what the engine was doing"),
        ("framework", "str", "the engine that hosts the failed code"),
        (
            "multimodal_frames",
            "bool",
            "the traceback goes through an encoder of images, audio or video",
        ),
        (
            "profiling_frames",
            "bool",
            "the traceback goes through the engine's profile run: there is no KV cache yet",
        ),
        (
            "start_frames",
            "bool",
            "the traceback goes through the engine's start: no request is served yet",
        ),
        ("prompt_step", "bool", "a step of prompts was computed, and no encoder's input"),
        ("pool_stands", "bool", "the engine had its KV cache when memory ran out"),
        ("before_kv_cache", "bool", "the allocation failed before the engine had a KV cache"),
        (
            "device_context_frames",
            "bool",
            "the traceback makes a tensor under a default device, as a model is built",
        ),
        (
            "later_weights_frames",
            "bool",
            "the traceback loads weights beside a KV cache: a draft's, or new ones",
        ),
        (
            "first_call_frames",
            "bool",
            "the traceback goes through the process's first call to the device",
        ),
        ("attention_frames", "bool", "the traceback goes through attention"),
        (
            "evaluation_frames",
            "bool",
            "the traceback goes through an evaluation or a prediction, which computes no gradient",
        ),
        (
            "scheduled_frames",
            "bool",
            "the traceback goes through an engine that puts requests into batches itself",
        ),
        ("tensor_rows", "int", "first dimension of the tensor that was being made"),
        ("recovered", "bool", "the engine went on after the refusal"),
        ("sigkill_only", "bool", "SIGKILL is all that the text says of the end of a process"),
        ("exit_signal", "int", "signal that ended a process of the engine, by its number on Linux"),
        (
            "engine_error",
            "str",
            "the exception that ended a process of the engine, as it was printed",
        ),
        ("engine_error_line", "int", "the line on which that exception stands"),
        (
            "engine_error_of_memory",
            "bool",
            "that exception's message speaks of memory that could not be had",
        ),
        (
            "engine_error_hides_cause",
            "bool",
            "that exception does not say which error of CUDA's it met",
        ),
        (
            "engine_error_follows",
            "bool",
            "that exception only follows from the end of another process",
        ),
        (
            "engine_error_is_its_end",
            "bool",
            "the engine itself printed that exception as what it ended with",
        ),
        ("asleep", "bool", "the engine sleeps: it gave its device memory back"),
        (
            "sleep_freed_bytes",
            "int",
            "device memory that was free once the engine slept, and not before",
        ),
        (
            "sleep_used_bytes",
            "int",
            "device memory in use, by any process, after the engine last went to sleep",
        ),
        ("sleep_used_each", "str", "the same after each sleep, in GiB, the latest last"),
        ("wake_needed_bytes", "int", "device memory that the engine maps again when it wakes up"),
        ("sleep_account", "str", "what the log says of the engine's sleep, in sentences"),
        ("pool_allocator", "bool", "the allocator of vLLM's sleep mode was refused the memory"),
        ("trainer_frames", "bool", "a trainer runs in the process that wakes the engine"),
        ("lora_frames", "bool", "the traceback goes through the slots of LoRA adapters"),
        ("draft_model", "str", "the draft model's name or folder"),
        ("drafted_tokens", "int", "tokens that are drafted in a step"),
        (
            "ngram_frames",
            "bool",
            "drafts are looked up in the prompt, by the settings or the traceback",
        ),
        ("array_shape", "str", "dimensions of the array that was refused"),
        ("array_type", "str", "data type of the array that was refused"),
        ("prompt_long", "bool", "the text says that the prompt or the context is long"),
        (
            "whole_set_frames",
            "bool",
            "the traceback's call of a model takes a whole set, by its variable's name",
        ),
        ("buffer", "str", "what the failed buffer was for"),
        ("own_bytes", "int", "device memory that the failed process held"),
        ("own_ratio", "float", "share of the device that the failed process held"),
        ("others_bytes", "int", "device memory that is neither free nor of the failed process"),
        (
            "others_ratio",
            "float",
            "share of the device that is neither free nor of the failed process",
        ),
        ("tried_ratio", "float", "the failed allocation as a share of the device"),
        (
            "unused_bytes",
            "int",
            "memory that torch held and no tensor used, whatever the message calls it",
        ),
        ("unused_ratio", "float", "share of the device that torch held and no tensor used"),
        (
            "device_share_ratio",
            "float",
            "share of the device that the engine may take, whatever the engine calls it",
        ),
        (
            "free_in_pieces",
            "bool",
            "whether the allocator says that what is free lies in pieces that are too small",
        ),
        ("model_parameters", "float", "parameters of the model, from its name"),
        (
            "estimated_weights_bytes",
            "int",
            "weights of one rank, from the model's name and data type",
        ),
        ("stated_model", "str", "the one model that the lines of the failure name"),
        ("stated_weights_bytes", "int", "weights of that model at 16 bits"),
        (
            "before_graphs",
            "bool",
            "torch names no private pool: no CUDA graph was captured by then",
        ),
        (
            "estimated_weights_4bit_bytes",
            "int",
            "weights of one rank at four bits, from the model's name",
        ),
        (
            "allocation",
            "str",
            "which of the engine's tensors has just the bytes that were asked for",
        ),
        ("allocation_terms", "str", "the settings and the model's numbers whose product they are"),
        (
            "allocation_sure_ratio",
            "float",
            "how sure that is, by how many other products have as many bytes",
        ),
        (
            "allocation_of_request",
            "bool",
            "a request alone decides how large it is, and no setting does",
        ),
        ("host_available_bytes", "int", "memory that the host had free at the failure"),
        (
            "host_limit_bytes",
            "int",
            "host memory that the container, the job or the control group may have",
        ),
        ("host_used_bytes", "int", "host memory that was in use on the node when it ran out"),
        (
            "host_victim",
            "str",
            "the process or container that was ended because host memory ran out",
        ),
        ("host_victim_bytes", "int", "host memory that it had"),
        ("host_holder", "str", "the process with most host memory of those that the text lists"),
        ("host_holder_bytes", "int", "host memory that it had"),
        ("host_scope", "str", "what was full: the limit of a container or job, or the node"),
        ("host_manager", "str", "who enforces or reports it: slurm, kubernetes, docker or ray"),
        (
            "host_phase",
            "str",
            (
                "what took the host's memory: load_weights, data_loader, compile, swap_space, "
                "page_file or refused"
            ),
        ),
        ("host_offload", "bool", "weights or the KV cache are offloaded to the host"),
        (
            "process_data_limit_bytes",
            "int",
            "private memory that a process of the engine may have, by ulimit -d",
        ),
        ("host_total_bytes", "int", "memory of the host"),
        # the user's own line, from a traceback
        ("call_file", "str", "the user's file whose call failed, without its folder"),
        ("call_line", "int", "line of that file"),
        ("call_source", "str", "the line's source"),
        ("call_function", "str", "the user's function that the line is in"),
        ("call_argument", "str", "name of the first argument that the line passes on"),
        ("calls_model", "bool", "the line calls a model, its generate or a pipeline"),
        # a guarded call
        ("batch_size", "int", "rows of the failed call"),
        ("rows_run_apart", "bool", "the rows of the failed call can be run in smaller parts"),
        ("prompt_tokens", "int", "prompt length of the failed call, padding included"),
        ("max_new_tokens", "int", "tokens that the failed call may generate"),
        ("baseline_bytes", "int", "live bytes on the device before the failed call"),
        (
            "held_before_call_bytes",
            "int",
            "live bytes on the device before the failed call, besides its model",
        ),
        ("peak_bytes", "int", "largest number of live bytes during the attempt"),
        # what the user decided, filled from the command or the log's own echo of it
        ("kv_cache_memory_bytes", "int", "byte count of the KV cache that the user set"),
        ("kv_cache_memory_bytes_set", "bool", "the user set a byte count for the KV cache"),
        ("num_gpu_blocks_override_set", "bool", "the user set the number of KV blocks"),
        ("gpu_memory_utilization_set", "bool", "the user set the utilization"),
        ("max_model_len_set", "bool", "the user set max_model_len"),
        ("enable_prefix_caching_set", "bool", "the user set prefix caching on or off"),
        ("kv_cache_dtype_set", "bool", "the user set the data type of the KV cache"),
    ]
    return {name: FactSpec(name, kind, meaning) for name, kind, meaning in rows}


REGISTRY: Final[dict[str, FactSpec]] = _specs()


__all__ = [
    "GIB",
    "MIB",
    "REGISTRY",
    "YES_NO",
    "Fact",
    "FactValue",
    "Size",
    "coerce",
    "format_gib",
    "format_rounded",
    "is_of_type",
    "number_of",
    "parse_size",
]

GIB: Final = 2**30
MIB: Final = 2**20


@dataclass(frozen=True, slots=True, repr=False)
class Fact(Record):
    """One value: ``source`` is ``printed``, ``command``, ``script`` (a flag that the program may
    ignore), ``given``, ``measured``, ``config`` or ``solved``.

    ``slack`` is half of the last printed digit in the fact's unit (0 for an exact value); ``line``
    is the 1-based line of the log that it was read from, None for any other source.
    """

    name: str
    value: FactValue
    source: str = "printed"
    slack: float = 0.0
    line: int | None = None


def number_of(facts: Mapping[str, Fact], name: str) -> float | None:
    """Return the value of a numeric fact, in the unit of its name; None if unknown (unknown is
    never zero).
    """
    fact = facts.get(name)
    if fact is None or isinstance(fact.value, (str, bool)):
        return None
    return fact.value


# Engines write GB and mean 2^30 (old vLLM, MPS); nobody in this field prints a decimal gigabyte for
# device memory.
_UNIT_BYTES: Final = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    f"{letter}{end}": 1024**power
    for power, letter in enumerate("kmgt", 1)
    for end in ("", "b", "ib")
}
_SIZE = re.compile(r"\s*([+-]?\d[\d,]*(?:\.\d+)?|[+-]?\.\d+)\s*([A-Za-z]*)\s*\Z")

YES_NO: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _countable(text: str) -> int:
    digits = text.replace(",", "")
    if len(digits) > 18:  # more than any count has, and more than every double holds
        raise ValueError(text)
    return int(digits)


@dataclass(frozen=True, slots=True)
class Size:
    """A size in bytes and half of its last printed digit, in bytes."""

    bytes: int
    slack_bytes: float


def is_of_type(name: str, value: object) -> bool:
    """Return whether a value may stand in the fact ``name``: of its type, and finite."""
    kind = REGISTRY[name].type
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, int if kind == "int" else (int, float)) and abs(value) < 2**65


def parse_size(text: str) -> Size:
    """Read ``8GiB``, ``24.56 MiB``, ``1000000`` or ``-0.5 GiB`` as bytes (2^10 steps).

    Raises SettingError for a text that is not a size.
    """
    match = _SIZE.match(text)
    if match:
        factor = _UNIT_BYTES.get(match.group(2).lower())
    else:
        factor = None
    if match is None or factor is None:
        raise SettingError(
            f"not a size: {text!r}", hint="write a number and a unit, for example 8GiB or 512MiB"
        )
    number = match.group(1).replace(",", "")
    decimals = len(number.partition(".")[2])
    if factor == 1:
        slack = 0.0
    else:
        slack = 0.5 * 10.0**-decimals * factor
    try:
        return Size(round(_finite(number) * factor), slack)
    except (ValueError, OverflowError):
        raise SettingError("not a size: more digits than any memory has") from None


def format_gib(size_bytes: float, digits: int = 2) -> str:
    """Write bytes as GiB with the same precision everywhere; below 0.1 GiB as MiB, so that no
    figure reads 0.00.
    """
    magnitude = abs(size_bytes)
    if magnitude >= 0.1 * GIB or magnitude == 0:
        return f"{size_bytes / GIB:.{digits}f} GiB"
    if magnitude >= 0.1 * MIB:
        return f"{size_bytes / MIB:.{digits}f} MiB"
    return f"{size_bytes:.0f} bytes"


def format_rounded(size_bytes: float, slack_bytes: float) -> str:
    """Write a printed size without claiming more digits than were printed: "0.0 GiB" is
    not zero.
    """
    if slack_bytes and size_bytes == 0:
        if slack_bytes >= 0.001 * GIB:
            return f"less than {slack_bytes / GIB:.2g} GiB"
        return f"less than {format_gib(slack_bytes)}"
    if slack_bytes > 0.1 * abs(size_bytes):
        return f"about {size_bytes / GIB:.2g} GiB"
    return format_gib(size_bytes)


def coerce(name: str, text: str) -> Fact:
    """Turn the text of a captured group or of ``--set`` into the fact ``name``; a size may carry a
    unit.

    Raises SettingError for an unknown name or a text of the wrong type.
    """
    if (spec := REGISTRY.get(name)) is None:
        raise SettingError(f"unknown fact: {name}")
    if spec.name.endswith("_bytes"):
        size = parse_size(text)
        return Fact(name, size.bytes, slack=size.slack_bytes)
    try:
        if spec.type == "int":
            return Fact(name, _countable(text))
        if spec.type == "float":
            return Fact(name, _finite(text), slack=0.5 * 10.0 ** -len(text.partition(".")[2]))
        if spec.type == "bool":
            return Fact(name, YES_NO[text.lower()])
    except (ValueError, KeyError):
        raise SettingError(f"{name} is {spec.type}, not {text!r}") from None
    return Fact(name, text)
