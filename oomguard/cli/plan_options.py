"""The many options of ``oomguard plan``: the engine's own settings, and those of a call of ``generate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from oomguard.cli.options import F, decorated, option
from oomguard.surfaces import surfaces

POSITIVE: Final = click.IntRange(1)


def engine_options(function: F) -> F:
    """Add vLLM's settings, each with the flags of vLLM's own data file."""
    return decorated(
        function,
        (
            _setting("tensor_parallel_size", type=POSITIVE, default=1, help="GPUs that share each layer."),
            _setting("pipeline_parallel_size", type=POSITIVE, default=1, help="Groups of GPUs that share the layers."),
            _setting(
                "data_parallel_size",
                type=POSITIVE,
                default=1,
                help="Copies of the model; experts are spread over them.",
            ),
            _setting(
                "decode_context_parallel_size",
                type=POSITIVE,
                default=1,
                help="Ranks of those that share a request's cache by its tokens.",
            ),
            _setting("enable_expert_parallel", is_flag=True, help="Whole experts on each GPU, not parts of all."),
            _setting("disable_custom_all_reduce", is_flag=True, help="NCCL alone between ranks."),
            _setting("max_model_len", type=POSITIVE, help="Longest request. [default: the model's own]"),
            _setting("max_num_seqs", type=POSITIVE, help="Requests in one step. [default: vllm serve's for the GPU]"),
            _setting(
                "max_num_batched_tokens",
                type=POSITIVE,
                help="Tokens in one step. [default: vllm serve's for the GPU]",
            ),
            _setting(
                "gpu_memory_utilization",
                type=click.FloatRange(0, 1, min_open=True),
                help="Share of the GPU. [default: the version's]",
            ),
            _setting(
                "kv_cache_memory_bytes",
                metavar="SIZE",
                help="Size of the KV cache on each GPU; the utilization then decides nothing.",
            ),
            _setting("kv_cache_dtype", default="auto", metavar="DTYPE", help="auto, fp8, bfloat16, …"),
            _setting("dtype", default="auto", metavar="DTYPE", help="auto, bfloat16, float16, float32."),
            _setting(
                "quantization",
                metavar="METHOD",
                help="While loading: fp8, bitsandbytes. A quantised checkpoint says so itself.",
            ),
            _setting("block_size", type=POSITIVE, help="Tokens in a block of the KV cache. [default: the platform's]"),
            _setting("enforce_eager", is_flag=True, help="No CUDA graphs."),
            _setting(
                "cudagraph_capture_sizes",
                metavar="SIZES",
                help="Sizes of the CUDA graphs. [default: the version's for max_num_seqs]",
            ),
            _setting("max_cudagraph_capture_size", type=POSITIVE, help="The largest of them. [default: the version's]"),
            _setting("enable_prefix_caching", default=None, help="Keep prefixes. [default: the version's]"),
            _setting(
                "cpu_offload_bytes",
                parameter="cpu_offload_gb",
                type=click.FloatRange(0),
                default=0.0,
                help="GiB of weights on each GPU that stay in host memory.",
            ),
            _setting(
                "mamba_ssm_cache_dtype",
                default="auto",
                metavar="DTYPE",
                help="Recurrent states: auto, float32, bfloat16, float16.",
            ),
            _setting(
                "speculative_config",
                metavar="JSON",
                help='Drafts: {"model": "DRAFT", "num_speculative_tokens": 5}, as vLLM takes it.',
            ),
            _setting("enable_lora", is_flag=True, help="Slots for LoRA adapters."),
            _setting("max_loras", type=POSITIVE, default=1, help="LoRA adapters in one step. [default: 1]"),
            _setting("max_lora_rank", type=POSITIVE, default=16, help="Largest rank of an adapter. [default: 16]"),
            _setting(
                "limit_mm_per_prompt",
                metavar="JSON",
                help='Images and video of a prompt: {"image": 2, "video": 0}.',
            ),
            _setting(
                "mm_processor_kwargs",
                metavar="JSON",
                help='What the processor of images gets: {"max_pixels": 1003520}.',
            ),
            _setting("skip_mm_profiling", is_flag=True, help="No room kept for the encoder's own peak."),
            option("--prompt-logprobs", is_flag=True, help="Requests ask for log-probabilities of their prompts."),
        ),
    )


def call_options(function: F) -> F:
    """Add the numbers of a call of transformers' generate."""
    return decorated(
        function,
        (
            option("--batch-size", type=POSITIVE, default=1, help="transformers: rows of the call. [default: 1]"),
            option(
                "--prompt-tokens",
                type=POSITIVE,
                default=1024,
                help="transformers: prompt length, padding included. [default: 1024]",
            ),
            option(
                "--max-new-tokens",
                type=POSITIVE,
                default=256,
                help="transformers: tokens that it may generate. [default: 256]",
            ),
            option("--num-beams", type=POSITIVE, default=1, help="transformers: beams of a row. [default: 1]"),
            option(
                "--attn-implementation",
                default="sdpa",
                metavar="NAME",
                help="transformers: sdpa or eager. [default: sdpa]",
            ),
            option(
                "--cache-implementation",
                metavar="NAME",
                help="transformers: static, … [default: the dynamic cache]",
            ),
            option(
                "--trace",
                is_flag=True,
                help="transformers: run the model's own code under fake tensors; seconds, exact, no GPU.",
            ),
        ),
    )


def _setting(name: str, *, parameter: str | None = None, **kwargs: Any) -> Callable[[F], F]:
    """Return the option of one setting, spelled as vLLM spells it; yes/no with a default of None also takes its off form."""
    own = surfaces("vllm")[name]
    long, *short = own.flags
    if kwargs.get("default", ...) is None and "metavar" not in kwargs and "type" not in kwargs:
        long = f"{long}/{own.off_flag}"
    return option(long, *short, parameter or name, **kwargs)
