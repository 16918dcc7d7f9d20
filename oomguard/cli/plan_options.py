"""The many options of ``oomguard plan``: the engine's own settings, and those of a call of ``generate``."""

from __future__ import annotations

from typing import Final

import click

from oomguard.cli.options import F, option

POSITIVE: Final = click.IntRange(1)


def engine_options(function: F) -> F:
    """vLLM's settings, spelled as vLLM spells them."""
    for decorate in reversed((
        option("--tensor-parallel-size", "-tp", type=POSITIVE, default=1, help="GPUs that share each layer."),
        option("--pipeline-parallel-size", "-pp", type=POSITIVE, default=1, help="Groups of GPUs that share the layers."),
        option("--data-parallel-size", "-dp", type=POSITIVE, default=1, help="Copies of the model; experts are spread over them."),
        option("--enable-expert-parallel", "-ep", is_flag=True, help="Whole experts on each GPU, not parts of all."),
        option("--max-model-len", type=POSITIVE, help="Longest request. [default: the model's own]"),
        option("--max-num-seqs", type=POSITIVE, help="Requests in one step. [default: vllm serve's for the GPU]"),
        option("--max-num-batched-tokens", type=POSITIVE, help="Tokens in one step. [default: vllm serve's for the GPU]"),
        option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), help="Share of the GPU. [default: the version's]"),
        option("--kv-cache-memory-bytes", metavar="SIZE", help="Size of the KV cache on each GPU; the utilization then decides nothing."),
        option("--kv-cache-dtype", default="auto", metavar="DTYPE", help="auto, fp8, bfloat16, …"),
        option("--dtype", default="auto", metavar="DTYPE", help="auto, bfloat16, float16, float32."),
        option("--quantization", "-q", metavar="METHOD", help="While loading: fp8, bitsandbytes. A quantised checkpoint says so itself."),
        option("--block-size", type=POSITIVE, help="Tokens in a block of the KV cache. [default: the platform's]"),
        option("--enforce-eager", is_flag=True, help="No CUDA graphs."),
        option("--enable-prefix-caching/--no-enable-prefix-caching", default=None, help="Keep prefixes. [default: the version's]"),
        option("--cpu-offload-gb", type=click.FloatRange(0), default=0.0, help="GiB of weights on each GPU that stay in host memory."),
        option("--mamba-ssm-cache-dtype", default="auto", metavar="DTYPE", help="Recurrent states: auto, float32, bfloat16, float16."),
        option("--speculative-config", metavar="JSON", help='Drafts: {"model": "DRAFT", "num_speculative_tokens": 5}, as vLLM takes it.'),
        option("--enable-lora", is_flag=True, help="Slots for LoRA adapters."),
        option("--max-loras", type=POSITIVE, default=1, help="Adapters in one step. [default: 1]"),
        option("--max-lora-rank", type=POSITIVE, default=16, help="Largest rank of an adapter. [default: 16]"),
        option("--limit-mm-per-prompt", metavar="JSON", help='Images and video of a prompt: {"image": 2, "video": 0}.'),
        option("--prompt-logprobs", is_flag=True, help="Requests ask for log-probabilities of their prompts."),
    )):  # fmt: skip
        function = decorate(function)
    return function


def call_options(function: F) -> F:
    """A call of transformers' generate."""
    for decorate in reversed((
        option("--batch-size", type=POSITIVE, default=1, help="transformers: rows of the call. [default: 1]"),
        option("--prompt-tokens", type=POSITIVE, default=1024, help="transformers: prompt length, padding included. [default: 1024]"),
        option("--max-new-tokens", type=POSITIVE, default=256, help="transformers: tokens that it may generate. [default: 256]"),
        option("--num-beams", type=POSITIVE, default=1, help="transformers: beams of a row. [default: 1]"),
        option("--attn-implementation", default="sdpa", metavar="NAME", help="transformers: sdpa or eager. [default: sdpa]"),
        option("--cache-implementation", metavar="NAME", help="transformers: static, … [default: the dynamic cache]"),
        option("--trace", is_flag=True, help="transformers: run the model's own code under fake tensors; seconds, exact, no GPU."),
    )):  # fmt: skip
        function = decorate(function)
    return function
