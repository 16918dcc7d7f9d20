"""Define facts: the named, typed values that oomguard reasons over, each with its source.

Engines round the figures that they print. A fact's ``slack`` is half of the last printed digit, so
that solvers can stay on the safe side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from oomguard.core.errors import SettingError
from oomguard.core.records import Record

# The registry is closed: a fact that is not listed here cannot be used in a rule. The end of a
# fact's name is its unit: ``_bytes`` (int), ``_tokens`` (int), ``_ratio`` (float, 0 to 1). Counts,
# texts and yes/no facts have no suffix.

FactType = Literal["int", "float", "bool", "str"]
FactValue = int | float | bool | str


class FactSpec(NamedTuple):
    """Describe one fact: its type and its meaning."""

    name: str
    type: FactType
    meaning: str


def _specs() -> dict[str, FactSpec]:
    rows: list[tuple[str, FactType, str]] = [
        # the allocator
        ("tried_bytes", "int", "size of the failed allocation"),
        ("device_total_bytes", "int", "total memory of the device"),
        ("device_free_bytes", "int", "free memory of the device at the failure"),
        (
            "process_in_use_bytes",
            "int",
            "device memory of the failing process, inside and outside torch",
        ),
        (
            "other_process_in_use_bytes",
            "int",
            "device memory of the other processes that the message names",
        ),
        ("allocated_bytes", "int", "memory of the process's live tensors"),
        ("allowed_bytes", "int", "limit that a memory fraction sets for the process"),
        ("reserved_total_bytes", "int", "memory that torch's caching allocator reserved"),
        ("reserved_unallocated_bytes", "int", "memory that torch reserved and no tensor uses"),
        ("private_pool_bytes", "int", "memory in private pools, such as those of CUDA graphs"),
        ("non_torch_bytes", "int", "device memory of the process outside torch's allocator"),
        ("gpu_index", "int", "index of the device in the message"),
        (
            "allocator_variable",
            "str",
            "environment variable for allocator options that the message names",
        ),
        ("torch_version", "str", "torch version that the log prints"),
        (
            "program_arguments_bytes",
            "int",
            "size of a compiled program's arguments: weights, cache and inputs",
        ),
        (
            "program_bytes",
            "int",
            "size of a compiled program's temporaries",
        ),
        (
            "free_blocks_bytes",
            "int",
            "free blocks in the segments that the failed allocation could use",
        ),
        ("largest_free_block_bytes", "int", "largest of these free blocks"),
        (
            "waiting_blocks_bytes",
            "int",
            "freed blocks in these segments that still wait for another stream",
        ),
        ("largest_holder", "str", "code that allocated most of the memory in use"),
        ("largest_holder_bytes", "int", "memory in use that this code allocated"),
        # vLLM
        ("kv_cache_needed_bytes", "int", "KV cache that one request of max_model_len tokens needs"),
        (
            "kv_cache_available_bytes",
            "int",
            "memory left for the KV cache; negative if everything else takes too much",
        ),
        ("kv_cache_capacity_tokens", "int", "tokens that fit in the KV cache"),
        ("kv_cache_requested_bytes", "int", "KV cache size that the user or the engine requested"),
        (
            "kv_cache_pool_bytes",
            "int",
            "KV cache size that the user set, without rounding",
        ),
        ("kv_bytes_per_token", "int", "KV cache bytes of one token in all layers of one rank"),
        ("kv_cache_block_bytes", "int", "bytes of one KV cache block in all layers of one rank"),
        (
            "kv_cache_needed_blocks",
            "int",
            "KV blocks for one request of max_model_len tokens plus the engine's own block",
        ),
        (
            "kv_cache_fitting_blocks",
            "int",
            "KV blocks that fit if the user sets no number of blocks",
        ),
        (
            "kv_cache_is_fixed",
            "bool",
            "the KV cache size is set in bytes or blocks, so the utilization has no effect",
        ),
        ("num_gpu_blocks_override", "int", "number of KV blocks that the user set"),
        (
            "fitting_block_tokens",
            "int",
            "smaller block_size with which one request fits in the KV cache",
        ),
        (
            "overridden_kv_cache_bytes",
            "int",
            "KV cache size that an environment variable overrides",
        ),
        ("fits_without_cached_prefixes", "bool", "one request fits without cached prefixes"),
        ("explicit_kv_cache_bytes", "int", "KV cache size set in bytes, as printed by the engine"),
        ("ignored_kv_cache_bytes", "int", "KV cache size that the user set without any effect"),
        (
            "fitting_step_tokens",
            "int",
            "max_num_batched_tokens with which one request of the full length fits",
        ),
        ("max_model_len_tokens", "int", "longest request: prompt plus answer"),
        (
            "estimated_max_model_len_tokens",
            "int",
            "longest request that fits, as printed by the engine",
        ),
        ("gpu_memory_utilization_ratio", "float", "share of the device that vLLM may use"),
        ("desired_bytes", "int", "device memory that the utilization allows the engine"),
        ("max_num_seqs", "int", "maximum number of sequences in one step"),
        ("max_num_batched_tokens", "int", "maximum number of tokens in one step"),
        ("model_weights_bytes", "int", "memory of the loaded weights"),
        ("peak_activation_bytes", "int", "transient peak while profiling"),
        ("cudagraph_bytes", "int", "memory of captured CUDA graphs"),
        (
            "graphs_not_counted",
            "bool",
            "the engine reserves no memory for CUDA graphs before it captures them",
        ),
        ("initial_free_bytes", "int", "free device memory before profiling"),
        ("current_free_bytes", "int", "free device memory after profiling"),
        ("consumed_bytes", "int", "device memory in use without the KV cache"),
        (
            "break_even_utilization_ratio",
            "float",
            "utilization at which the KV cache is empty; above 1 means no utilization helps",
        ),
        (
            "smallest_helpful_device_bytes",
            "int",
            "smallest device on which some utilization up to 1.0 helps",
        ),
        (
            "weights_above_free",
            "bool",
            "one rank's weights (printed, or from the model's name) exceed the free memory",
        ),
        ("asked_input_tokens", "int", "prompt length that the command sets"),
        ("asked_output_tokens", "int", "answer length that the command sets"),
        (
            "used_before_start_bytes",
            "int",
            "device memory in use before the engine started",
        ),
        ("numa_node", "int", "NUMA node of the CPU backend"),
        ("tensor_parallel_size", "int", "number of ranks that share each layer"),
        ("model", "str", "model name or folder, as printed by the engine"),
        ("architecture", "str", "model class that the engine chose"),
        ("dtype", "str", "data type of the weights"),
        ("framework_version", "str", "version that the engine printed"),
        (
            "step_requests",
            "str",
            "requests in the failed step with their tokens, as dumped by the engine",
        ),
        ("step_tokens", "int", "tokens of all requests in the failed step"),
        (
            "worked_step_tokens",
            "int",
            "limit of a step's tokens under which the engine worked before it ended",
        ),
        ("on_cpu", "bool", "the engine runs on its CPU backend"),
        ("prompt_logprobs", "bool", "the call requested log-probabilities of prompt tokens"),
        (
            "scores_prompts",
            "bool",
            "the text says that it scores prompts (log-probabilities or perplexity)",
        ),
        ("prefix_caching", "bool", "prefix caching is on"),
        ("whole_prompts", "bool", "each step contains whole prompts: chunked prefill is off"),
        ("multimodal", "bool", "the model takes images, audio or video"),
        ("enforce_eager", "bool", "CUDA graphs are off"),
        ("loaded_free_bytes", "int", "free device memory after the weights were loaded"),
        (
            "static_share_least_ratio",
            "float",
            "loaded weights as a share of the memory that was free before",
        ),
        (
            "static_share_holds_weights",
            "bool",
            "the share for weights and KV cache is larger than the weights",
        ),
        ("pool_free_bytes", "int", "free device memory after the KV cache was allocated"),
        ("launch_shown", "bool", "the log shows the command that started the engine"),
        ("data_parallel_size", "int", "number of ranks that serve separate requests"),
        (
            "parallel_attention",
            "bool",
            "each of these ranks computes attention for its own requests",
        ),
        ("block_size_tokens", "int", "tokens in one block (page) of the KV cache"),
        (
            "mem_fraction_static_ratio",
            "float",
            "share of the device that SGLang may use for weights and KV cache",
        ),
        ("mamba_cache_blocks", "int", "state blocks that fit; each running sequence takes one"),
        ("mamba_blocks_per_request", "int", "state blocks that one running request takes"),
        ("mamba_block_bytes", "int", "memory of one state block"),
        (
            "mamba_full_memory_ratio",
            "float",
            "memory for states as a multiple of the KV cache",
        ),
        (
            "swa_full_tokens_ratio",
            "float",
            "tokens in sliding-window layers as a share of the other layers' tokens",
        ),
        ("max_total_tokens", "int", "KV cache size in tokens that the user set"),
        (
            "hicache_size",
            "int",
            "host memory of one rank's second-level KV cache, in 10^9 bytes",
        ),
        (
            "hicache_ratio",
            "float",
            "host memory of the second-level KV cache as a multiple of the device's pool",
        ),
        ("cuda_graph_max_bs", "int", "largest batch with a CUDA graph"),
        (
            "prefill_graphs",
            "bool",
            "the engine was capturing CUDA graphs for prompts, not for decoding",
        ),
        (
            "graph_sizes",
            "str",
            "batch sizes with a CUDA graph, as listed by the engine",
        ),
        (
            "graphs_captured",
            "int",
            "number of CUDA graphs captured when memory ran out (largest first)",
        ),
        ("graphs_wanted", "int", "number of CUDA graphs to capture"),
        ("graphs_free_bytes", "int", "free device memory when capture began"),
        ("image_tokens", "int", "tokens of one image of the largest size"),
        ("encoder_item_tokens", "int", "tokens of one image, audio or video"),
        ("encoder_budget_tokens", "int", "maximum number of encoder tokens in one step"),
        ("kv_slots_needed_tokens", "int", "KV cache tokens that a step requested"),
        ("kv_slots_free_tokens", "int", "KV cache tokens that were free"),
        (
            "window_slots_free_tokens",
            "int",
            "free tokens in the pool of sliding-window layers",
        ),
        (
            "running_requests",
            "int",
            "requests in the last step that the engine reported",
        ),
        ("kv_cache_used_tokens", "int", "KV cache tokens in use at that step"),
        (
            "request_slots_free",
            "int",
            "free slots in the engine's request table",
        ),
        ("request_slots_needed", "int", "request slots that a batch needed"),
        (
            "max_concurrency",
            "float",
            "number of full-length requests that fit in the KV cache together",
        ),
        ("kv_cache_blocks", "int", "number of KV cache blocks"),
        ("speculative", "bool", "a draft model or other speculation is on"),
        ("lora", "bool", "LoRA adapters are on"),
        ("quantized", "bool", "the weights are quantized"),
        (
            "run_by",
            "str",
            "program that made the failed call, or that runs llama.cpp",
        ),
        ("half_context_tokens", "int", "half of the context length"),
        ("expert_parallel", "bool", "the experts are distributed over the ranks"),
        (
            "engines_built",
            "int",
            "engines that the program creates one after another in one process",
        ),
        # read from the lines around a failure, and derived from all other facts
        ("phase", "str", "what the engine was doing"),
        ("framework", "str", "the engine that hosts the failed code"),
        (
            "multimodal_frames",
            "bool",
            "the traceback contains an encoder of images, audio or video",
        ),
        (
            "profiling_frames",
            "bool",
            "the traceback contains the engine's profile run, before any KV cache",
        ),
        (
            "start_frames",
            "bool",
            "the traceback contains the engine's start, before any request",
        ),
        ("prompt_step", "bool", "the step computed prompts and no encoder input"),
        ("pool_stands", "bool", "the engine had its KV cache when memory ran out"),
        ("before_kv_cache", "bool", "the allocation failed before the engine had a KV cache"),
        (
            "device_context_frames",
            "bool",
            "the traceback creates a tensor under a default device, as when building a model",
        ),
        (
            "later_weights_frames",
            "bool",
            "the traceback loads weights next to a KV cache: a draft model, or new weights",
        ),
        (
            "first_call_frames",
            "bool",
            "the traceback contains the process's first call to the device",
        ),
        ("attention_frames", "bool", "the traceback contains attention code"),
        ("eager_frames", "bool", "the traceback contains eager attention of transformers"),
        ("logits_frames", "bool", "the traceback computes the logits of a transformers model"),
        ("single_row", "bool", "the text shows that the call had one row"),
        (
            "evaluation_frames",
            "bool",
            "the traceback contains an evaluation or prediction without gradients",
        ),
        (
            "scheduled_frames",
            "bool",
            "the traceback contains an engine that forms batches of requests itself",
        ),
        ("tensor_rows", "int", "first dimension of the tensor being created"),
        ("recovered", "bool", "the engine continued after the failed allocation"),
        ("sigkill_only", "bool", "the text gives SIGKILL as the only reason why a process ended"),
        ("exit_signal", "int", "number (Linux) of the signal that ended an engine process"),
        (
            "engine_error",
            "str",
            "exception that ended an engine process, as printed",
        ),
        ("engine_error_line", "int", "line of that exception"),
        (
            "engine_error_of_memory",
            "bool",
            "that exception's message reports a failed allocation",
        ),
        (
            "engine_error_hides_cause",
            "bool",
            "that exception does not name the CUDA error",
        ),
        (
            "engine_error_follows",
            "bool",
            "that exception is only a consequence of another process's end",
        ),
        (
            "engine_error_is_its_end",
            "bool",
            "the engine printed that exception as the reason why it ended",
        ),
        ("asleep", "bool", "the engine sleeps and has released its device memory"),
        (
            "sleep_freed_bytes",
            "int",
            "device memory that the engine freed by going to sleep",
        ),
        (
            "sleep_used_bytes",
            "int",
            "device memory in use, by any process, after the engine last went to sleep",
        ),
        ("sleep_cycles", "int", "number of the engine's sleeps in the log"),
        (
            "sleep_residue_cycle",
            "int",
            "first sleep after which clearly more stayed in use, from 1",
        ),
        ("sleep_residue_used_bytes", "int", "memory that stayed in use after that sleep"),
        ("sleep_kept_by_engine", "bool", "the engine itself kept the memory at that sleep"),
        ("sleep_most_freed_bytes", "int", "memory that the best sleep freed"),
        ("sleep_least_used_bytes", "int", "memory that stayed in use after the best sleep"),
        ("sleep_used_each", "str", "memory in use after each sleep, in GiB, the latest last"),
        ("sleep_process", "str", "the process that printed its sleep"),
        ("sleep_level", "int", "1: the weights wait in host memory; 2: they are dropped"),
        ("grew_while_asleep", "bool", "less was free after the engine went to sleep than before"),
        ("sleeps_on_host", "bool", "sleeping engines keep their weights in host memory"),
        ("sleep_backup_frames", "bool", "the traceback copies weights to the host for a sleep"),
        ("sleeper_bytes", "int", "device memory that a sleeping engine still has"),
        ("residue_grows", "bool", "after each of several sleeps more memory stayed in use"),
        ("rl_framework", "str", "the trainer that takes turns with the engine"),
        ("trainer_allocated_bytes", "int", "the trainer's tensors on the device, as it printed"),
        ("trainer_reserved_bytes", "int", "the trainer's reserved memory, as it printed"),
        ("trainer_step", "int", "the trainer's step that ran"),
        ("trainer_finished_step", "int", "the trainer's last finished step"),
        ("trainer_offloads", "bool", "a command lets the trainer move its tensors to the host"),
        ("rollout_awake", "bool", "no line shows that the trainer's engine slept at the failure"),
        ("trainer_waits", "bool", "the trainer itself waits for the memory that an engine has"),
        ("deepspeed", "bool", "DeepSpeed runs the trainer"),
        ("megatron", "bool", "Megatron runs the trainer"),
        ("gathered_frames", "bool", "the traceback gathers all weights for the rollout engine"),
        ("synced_frames", "bool", "the traceback sends weights to the rollout engine"),
        ("verl_lora", "bool", "verl trains a LoRA adapter"),
        ("has_expandable_segments", "bool", "the environment turns expandable segments on"),
        ("device_listed_total_bytes", "int", "the device's size, as a trainer printed it"),
        ("device_listed_used_bytes", "int", "memory in use on the device, as a trainer printed"),
        ("device_processes", "str", "nvidia-smi's list of processes, as printed"),
        ("device_holder", "str", "who has the memory: trainer, engine, rollout or other"),
        ("device_holder_name", "str", "that process by its name and PID"),
        ("device_holder_pid", "int", "PID of that process"),
        ("device_holder_bytes", "int", "device memory of that process"),
        ("wake_needed_bytes", "int", "device memory that the engine needs to wake up"),
        ("sleep_account", "str", "summary of the log's lines about the engine's sleep"),
        ("pool_allocator", "bool", "the allocation by vLLM's sleep-mode allocator failed"),
        ("trainer_frames", "bool", "a trainer runs in the process that wakes the engine"),
        ("lora_frames", "bool", "the traceback contains the slots of LoRA adapters"),
        ("draft_model", "str", "the draft model's name or folder"),
        ("drafted_tokens", "int", "number of draft tokens in one step"),
        (
            "ngram_frames",
            "bool",
            "drafts come from the prompt (n-gram), by the settings or the traceback",
        ),
        ("array_shape", "str", "dimensions of the array that could not be allocated"),
        ("array_type", "str", "data type of the array that could not be allocated"),
        ("prompt_long", "bool", "the text says that the prompt or the context is long"),
        (
            "whole_set_frames",
            "bool",
            "the traceback passes a whole data set to a model, by its variable's name",
        ),
        ("buffer", "str", "purpose of the failed buffer"),
        ("max_loras", "int", "LoRA adapters that one batch may use"),
        ("max_lora_rank", "int", "largest rank of a LoRA adapter"),
        ("verl_rollout", "bool", "verl's command sets the rollout's utilization"),
        ("verl_offload_off", "bool", "verl's trainer keeps its weights or optimizer on the device"),
        ("kv_buffer_bytes", "int", "allocated buffer of llama.cpp's KV cache on the first device"),
        ("several_devices", "bool", "llama.cpp's weights are on several devices"),
        ("own_bytes", "int", "device memory of the failed process"),
        ("own_ratio", "float", "the failed process's share of the device"),
        ("others_bytes", "int", "device memory that other processes use"),
        (
            "others_ratio",
            "float",
            "share of the device that other processes use",
        ),
        ("tried_ratio", "float", "the failed allocation as a share of the device"),
        (
            "unused_bytes",
            "int",
            "memory that torch reserved and no tensor used",
        ),
        ("unused_ratio", "float", "share of the device that torch reserved and no tensor used"),
        (
            "device_share_ratio",
            "float",
            "share of the device that the engine may use, by any engine's setting",
        ),
        (
            "free_in_pieces",
            "bool",
            "the allocator says that the free memory is in pieces that are too small",
        ),
        ("model_parameters", "float", "number of the model's parameters, from its name"),
        (
            "estimated_weights_bytes",
            "int",
            "weights of one rank, from the model's name and data type",
        ),
        ("stated_model", "str", "the only model that the failure's lines name"),
        ("stated_weights_bytes", "int", "weights of that model at 16 bits"),
        (
            "before_graphs",
            "bool",
            "torch names no private pool, so no CUDA graph existed yet",
        ),
        (
            "estimated_weights_4bit_bytes",
            "int",
            "weights of one rank at four bits, from the model's name",
        ),
        (
            "allocation",
            "str",
            "the engine's tensor whose size equals the failed allocation",
        ),
        ("allocation_terms", "str", "settings and model numbers whose product is that size"),
        (
            "allocation_sure_ratio",
            "float",
            "probability of this match, given how many other products have this size",
        ),
        (
            "allocation_of_request",
            "bool",
            "only the request decides this size, not a setting",
        ),
        ("host_available_bytes", "int", "free host memory at the failure"),
        (
            "host_limit_bytes",
            "int",
            "host memory limit of the container, job or control group",
        ),
        ("host_used_bytes", "int", "host memory in use on the node when memory ran out"),
        (
            "host_victim",
            "str",
            "process or container that was killed because host memory ran out",
        ),
        ("host_victim_bytes", "int", "host memory of that process or container"),
        ("host_holder", "str", "process with the most host memory in the text's list"),
        ("host_holder_bytes", "int", "host memory of that process"),
        ("host_scope", "str", "what was full: the limit of a container or job, or the node"),
        ("host_pod", "str", "Kubernetes pod whose container was killed"),
        ("host_namespace", "str", "namespace of that pod"),
        ("host_container", "str", "name of that container in its pod"),
        ("host_workload", "str", "kind and name of what started that pod, by the pod's name"),
        ("host_next_limit", "str", "GiB, without a unit, of the memory limit to try next"),
        ("host_swap_bytes", "int", "host memory that vLLM's swap_space reserves for each GPU"),
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
            "limit of an engine process's private memory, from ulimit -d",
        ),
        ("host_total_bytes", "int", "total memory of the host"),
        ("host_requested_bytes", "int", "host memory that the container or job asked for"),
        ("host_peak_bytes", "int", "most host memory that the unit or job had"),
        ("host_reserve_bytes", "int", "host memory that oomguard keeps free"),
        ("host_room_bytes", "int", "host memory that the command may use above the reserve"),
        ("host_growth_bytes", "int", "growth of the host memory in use, per second"),
        ("host_machine_bytes", "int", "total memory of the machine, above any limit"),
        ("engine_in_host_memory", "bool", "weights and KV cache are in the host's memory"),
        # the user's own line, from a traceback
        ("call_file", "str", "user file whose call failed, without its folder"),
        ("call_line", "int", "line of that file"),
        ("call_source", "str", "the line's source"),
        ("call_function", "str", "user function that contains the line"),
        ("call_argument", "str", "name of the first argument in the line's call"),
        ("calls_model", "bool", "the line calls a model, its generate or a pipeline"),
        # a guarded call
        ("batch_size", "int", "number of rows in the failed call"),
        ("rows_run_apart", "bool", "the rows of the failed call can run in smaller micro-batches"),
        ("prompt_tokens", "int", "prompt length of the failed call, padding included"),
        ("max_new_tokens", "int", "maximum number of tokens that the failed call generates"),
        ("baseline_bytes", "int", "live bytes on the device before the failed call"),
        (
            "held_before_call_bytes",
            "int",
            "live bytes on the device before the failed call, without the model",
        ),
        ("peak_bytes", "int", "peak of live bytes during the attempt"),
        # set by the user, from the command or the log's echo of it
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
    """Hold one value with its source.

    Attributes:
        name: a name of ``REGISTRY``; its end is the unit.
        value: the value, in that unit.
        source: ``printed``, ``command``, ``script`` (a flag that the program may ignore),
            ``given``, ``measured``, ``config`` or ``solved``.
        slack: half of the last printed digit, in the same unit; 0 for an exact value.
        line: the line of the log, from 1; None for any other source.

        >>> Fact("tried_bytes", 2 * GIB, line=14).value
        2147483648
    """

    name: str
    value: FactValue
    source: str = "printed"
    slack: float = 0.0
    line: int | None = None


def number_of(facts: Mapping[str, Fact], name: str) -> float | None:
    """Return the value of a numeric fact, in the unit of its name.

    None if the fact is unknown; an unknown value is never zero.
    """
    fact = facts.get(name)
    if fact is None or isinstance(fact.value, (str, bool)):
        return None
    return fact.value


# Engines write GB and mean 2^30 (old vLLM, MPS). No engine prints device memory in decimal
# gigabytes.
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
    # more digits than any count has, and more than a double represents exactly
    if len(digits) > 18:
        raise ValueError(text)
    return int(digits)


class Size(NamedTuple):
    """Hold a size in bytes and half of its last printed digit, in bytes."""

    bytes: int
    slack_bytes: float


def is_of_type(name: str, value: object) -> bool:
    """Return whether a value has the type of the fact ``name`` and is finite."""
    kind = REGISTRY[name].type
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    if kind == "str":
        return isinstance(value, str)
    return isinstance(value, int if kind == "int" else (int, float)) and abs(value) < 2**65


def parse_size(text: str) -> Size:
    """Read a size such as ``8GiB`` or ``24.56 MiB`` as bytes (steps of 2^10).

    Raises:
        SettingError: if the text is not a size.

        >>> parse_size("8GiB").bytes
        8589934592
    """
    match = _SIZE.match(text)
    if match:
        factor = _UNIT_BYTES.get(match.group(2).lower())
    else:
        factor = None
    if match is None or factor is None:
        raise SettingError(
            f"{text!r} is not a size", hint="write a number and a unit, for example 8GiB or 512MiB"
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
        raise SettingError(f"{text[:20]!r}… is not a size: no memory has so many digits") from None


def format_gib(size_bytes: float, digits: int = 2) -> str:
    """Format bytes as GiB, or as MiB below 0.1 GiB, so that no size reads as 0.00.

    >>> format_gib(3 * 2**29)
    '1.50 GiB'
    """
    magnitude = abs(size_bytes)
    if magnitude >= 0.1 * GIB or magnitude == 0:
        return f"{size_bytes / GIB:.{digits}f} GiB"
    # Sizes in one sentence differ by small factors, so only tiny ones are bytes.
    if magnitude >= 0.01 * MIB:
        return f"{size_bytes / MIB:.{digits}f} MiB"
    return f"{size_bytes:.0f} bytes"


def format_rounded(size_bytes: float, slack_bytes: float) -> str:
    """Format a printed size with no more digits than the engine printed.

    An engine's "0.0 GiB" is not zero, so it becomes "less than …".
    """
    if slack_bytes and size_bytes == 0:
        if slack_bytes >= 0.001 * GIB:
            return f"less than {slack_bytes / GIB:.2g} GiB"
        return f"less than {format_gib(slack_bytes)}"
    if slack_bytes > 0.1 * abs(size_bytes):
        return f"about {size_bytes / GIB:.2g} GiB"
    return format_gib(size_bytes)


def coerce(name: str, text: str) -> Fact:
    """Convert text (a captured group, or ``--set``) to the fact ``name``.

    Raises:
        SettingError: if the name is unknown or the text has the wrong type.
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
        raise SettingError(f"{name} must be {spec.type}, got {text!r}") from None
    return Fact(name, text)
