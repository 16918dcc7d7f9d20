"""The closed registry of facts: the name, the type and the meaning of every value that oomguard reasons over.

A fact's unit is the end of its name: ``_bytes`` (int), ``_tokens`` (int), ``_ratio`` (float, 0 to 1), no suffix for
counts, text and yes/no.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
        ("process_in_use_bytes", "int", "device memory held by the failing process, torch's and other"),
        ("other_process_in_use_bytes", "int", "device memory held by other processes that the message names"),
        ("allocated_bytes", "int", "memory in live tensors of the process"),
        ("allowed_bytes", "int", "the cap that a memory fraction puts on the process"),
        ("reserved_total_bytes", "int", "memory that torch's caching allocator holds"),
        ("reserved_unallocated_bytes", "int", "memory that torch holds and no tensor uses"),
        ("private_pool_bytes", "int", "memory in private pools, CUDA graphs for example"),
        ("non_torch_bytes", "int", "device memory of the process outside torch's allocator"),
        ("gpu_index", "int", "index of the device in the message"),
        ("program_arguments_bytes", "int", "what a compiled program takes as its arguments: weights, cache and inputs"),
        ("program_bytes", "int", "what a compiled program needs beside its arguments: its temporaries"),
        ("free_blocks_bytes", "int", "free blocks, together, of the segments that the failed allocation could use"),
        ("largest_free_block_bytes", "int", "the largest of these blocks"),
        ("waiting_blocks_bytes", "int", "blocks of these segments that were freed and waited for another stream"),
        ("largest_holder", "str", "the code that allocated most of what was in use"),
        ("largest_holder_bytes", "int", "what of it was in use"),
        # vLLM
        ("kv_cache_needed_bytes", "int", "KV cache that one request of max_model_len tokens needs"),
        ("kv_cache_available_bytes", "int", "memory left for the KV cache; negative if the rest takes too much"),
        ("kv_cache_capacity_tokens", "int", "tokens that fit in the KV cache"),
        ("kv_cache_requested_bytes", "int", "KV cache size that was asked for"),
        ("kv_cache_pool_bytes", "int", "size of the KV cache as the user set it, exact where a printed one is rounded"),
        ("kv_bytes_per_token", "int", "KV cache bytes of one token over all layers of one rank"),
        ("kv_cache_block_bytes", "int", "one block of the KV cache over all layers of one rank"),
        ("kv_cache_needed_blocks", "int", "KV blocks for one request of max_model_len tokens and the engine's own one"),
        ("kv_cache_fitting_blocks", "int", "KV blocks that the memory holds where no number of them is set"),
        ("kv_cache_is_fixed", "bool", "bytes or blocks set the size of the KV cache, so no share decides it"),
        ("num_gpu_blocks_override", "int", "number of KV blocks that the user set"),
        ("fitting_block_tokens", "int", "block_size, less than was set, with which the KV cache holds a request"),
        ("overridden_kv_cache_bytes", "int", "KV cache size that was set too; an environment variable overrides it"),
        ("fits_without_cached_prefixes", "bool", "one request fits where no prefixes are cached"),
        ("explicit_kv_cache_bytes", "int", "KV cache size set in bytes, as the engine prints it"),
        ("ignored_kv_cache_bytes", "int", "KV cache size that was set and has no effect"),
        ("fitting_step_tokens", "int", "max_num_batched_tokens with which one request of the full length fits"),
        ("max_model_len_tokens", "int", "longest request, prompt and answer together"),
        ("estimated_max_model_len_tokens", "int", "longest request that fits, as the engine printed it"),
        ("gpu_memory_utilization_ratio", "float", "share of the device that vLLM may use"),
        ("desired_bytes", "int", "device memory that the utilization asks for"),
        ("max_num_seqs", "int", "sequences scheduled together at most"),
        ("max_num_batched_tokens", "int", "tokens scheduled in one step at most"),
        ("model_weights_bytes", "int", "memory of the loaded weights"),
        ("peak_activation_bytes", "int", "transient peak while profiling"),
        ("cudagraph_bytes", "int", "memory of captured CUDA graphs"),
        ("initial_free_bytes", "int", "free device memory before profiling"),
        ("current_free_bytes", "int", "free device memory after profiling"),
        ("consumed_bytes", "int", "device memory in use apart from the KV cache"),
        ("break_even_utilization_ratio", "float", "utilization that leaves no KV cache; above 1: none helps"),
        ("smallest_helpful_device_bytes", "int", "device size from which some utilization up to 1.0 helps"),
        ("used_before_start_bytes", "int", "device memory that others held before the engine started"),
        ("numa_node", "int", "NUMA node that the CPU backend is bound to"),
        ("tensor_parallel_size", "int", "ranks that share each layer"),
        ("model", "str", "model name or folder as the engine printed it"),
        ("architecture", "str", "model class that the engine resolved"),
        ("dtype", "str", "data type of the weights"),
        ("framework_version", "str", "version that the engine printed"),
        ("step_requests", "str", "requests in the step that failed, each with its tokens, as the engine dumped them"),
        ("step_tokens", "int", "tokens of all requests in the step that failed"),
        ("on_cpu", "bool", "the engine runs on its CPU backend"),
        ("prompt_logprobs", "bool", "log-probabilities of prompt tokens were asked for"),
        ("prefix_caching", "bool", "prefix caching is on"),
        ("whole_prompts", "bool", "a step holds whole prompts: chunked prefill is off"),
        ("multimodal", "bool", "the model takes images, audio or video"),
        ("enforce_eager", "bool", "CUDA graphs are off"),
        ("loaded_free_bytes", "int", "free device memory once the weights are loaded"),
        ("static_share_least_ratio", "float", "what the loaded weights take of the memory that was free before them"),
        ("block_size_tokens", "int", "tokens of a block, or page, of the KV cache"),
        ("mem_fraction_static_ratio", "float", "share of the device that SGLang may use for weights and KV cache"),
        ("mamba_cache_blocks", "int", "state blocks that fit, one for each running sequence"),
        ("image_tokens", "int", "tokens of one image of the largest size"),
        ("encoder_item_tokens", "int", "tokens of one image, audio or video"),
        ("encoder_budget_tokens", "int", "tokens that the encoder may take in one step"),
        ("kv_slots_needed_tokens", "int", "KV cache tokens that a step asked for"),
        ("kv_slots_free_tokens", "int", "KV cache tokens that were free"),
        ("running_requests", "int", "requests that ran together in the last step that the engine told of"),
        ("kv_cache_used_tokens", "int", "KV cache tokens that they held then"),
        ("request_slots_free", "int", "places for requests that were free in the engine's table of them"),
        ("request_slots_needed", "int", "places that a batch of requests asked for"),
        ("max_concurrency", "float", "requests of the full length that the KV cache holds together"),
        ("kv_cache_blocks", "int", "blocks of the KV cache"),
        ("speculative", "bool", "a draft model or other speculation is on"),
        ("lora", "bool", "LoRA adapters are on"),
        ("quantized", "bool", "the weights are quantised"),
        ("engines_built", "int", "engines that the program builds one after the other in one process"),
        # what the lines beside a failure tell, and what follows from all of it
        ("phase", "str", "what the engine was doing"),
        ("framework", "str", "the engine that hosts the failed code"),
        ("multimodal_frames", "bool", "the traceback goes through an encoder of images, audio or video"),
        ("profiling_frames", "bool", "the traceback goes through the engine's profile run: there is no KV cache yet"),
        ("before_kv_cache", "bool", "the allocation failed before the engine had a KV cache"),
        ("attention_frames", "bool", "the traceback goes through attention"),
        ("logits_frames", "bool", "the traceback goes through the output layer"),
        (
            "evaluation_frames",
            "bool",
            "the traceback goes through an evaluation or a prediction, which computes no gradient",
        ),
        ("scheduled_frames", "bool", "the traceback goes through an engine that puts requests into batches itself"),
        ("forward_frames", "bool", "the traceback goes through a model's forward"),
        ("tensor_rows", "int", "first dimension of the tensor that was being made"),
        ("recovered", "bool", "the engine went on after the refusal"),
        ("exit_signal", "int", "signal that ended a process of the engine, by its number on Linux"),
        ("lora_frames", "bool", "the traceback goes through the slots of LoRA adapters"),
        ("draft_model", "str", "the draft model's name or folder"),
        ("drafted_tokens", "int", "tokens that are drafted in a step"),
        ("ngram_frames", "bool", "drafts are looked up in the prompt, by the settings or the traceback"),
        ("array_shape", "str", "dimensions of the array that was refused"),
        ("array_type", "str", "data type of the array that was refused"),
        ("prompt_long", "bool", "the text says that the prompt or the context is long"),
        ("told_cause", "str", "the cause that who wrote the failure down names beside it"),
        ("buffer", "str", "what the failed buffer was for"),
        ("own_bytes", "int", "device memory that the failed process held"),
        ("own_ratio", "float", "share of the device that the failed process held"),
        ("others_bytes", "int", "device memory that is neither free nor of the failed process"),
        ("others_ratio", "float", "share of the device that is neither free nor of the failed process"),
        ("tried_ratio", "float", "the failed allocation as a share of the device"),
        ("unused_bytes", "int", "memory that torch held and no tensor used, whatever the message calls it"),
        ("unused_ratio", "float", "share of the device that torch held and no tensor used"),
        ("device_share_ratio", "float", "share of the device that the engine may take, whatever the engine calls it"),
        ("free_in_pieces", "bool", "whether the allocator says that what is free lies in pieces that are too small"),
        ("model_parameters", "float", "parameters of the model, from its name"),
        ("estimated_weights_bytes", "int", "weights of one rank, from the model's name and data type"),
        ("estimated_weights_4bit_bytes", "int", "weights of one rank at four bits, from the model's name"),
        ("allocation", "str", "which of the engine's tensors has just the bytes that were asked for"),
        ("allocation_terms", "str", "the settings and the model's numbers whose product they are"),
        ("allocation_sure_ratio", "float", "how sure that is, by how many other products have as many bytes"),
        ("allocation_of_request", "bool", "a request alone decides how large it is, and no setting does"),
        ("host_available_bytes", "int", "memory that the host had free at the failure"),
        ("process_data_limit_bytes", "int", "private memory that a process of the engine may have, by ulimit -d"),
        ("host_total_bytes", "int", "memory of the host, of which the engine's CPU backend takes a share"),
        # a guarded call
        ("batch_size", "int", "rows of the failed call"),
        ("fitting_rows", "int", "rows of the failed call that fit, by a trace of it"),
        ("prompt_tokens", "int", "prompt length of the failed call, padding included"),
        ("max_new_tokens", "int", "tokens that the failed call may generate"),
        ("baseline_bytes", "int", "live bytes on the device before the failed call"),
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
