"""A planned start as a table with a bar for a terminal, as JSON, and as the flags that vLLM takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from oomguard.facts import GIB, format_gib
from oomguard.incident import Budget, BudgetPart
from oomguard.memory_plan import GeneratePlan, MemoryPlan, VllmSettings
from oomguard.report.terminal_bar import Bar

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Final = 1
# vLLM's flag for each setting, in the order in which a command is read; True stands for a flag without a value.
_FLAGS: Final = (
    ("tensor_parallel_size", "--tensor-parallel-size", 1), ("pipeline_parallel_size", "--pipeline-parallel-size", 1),
    ("data_parallel_size", "--data-parallel-size", 1), ("enable_expert_parallel", "--enable-expert-parallel", False),
    ("max_model_len", "--max-model-len", None), ("max_num_seqs", "--max-num-seqs", None),
    ("max_num_batched_tokens", "--max-num-batched-tokens", None), ("gpu_memory_utilization", "--gpu-memory-utilization", None),
    ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", None), ("kv_cache_dtype", "--kv-cache-dtype", "auto"),
    ("dtype", "--dtype", "auto"),
    ("quantization", "--quantization", None), ("block_size", "--block-size", None), ("enforce_eager", "--enforce-eager", False),
    ("mamba_ssm_cache_dtype", "--mamba-ssm-cache-dtype", "auto"), ("enable_prefix_caching", "--enable-prefix-caching", None),
    ("speculative_config", "--speculative-config", None), ("enable_lora", "--enable-lora", False), ("max_loras", "--max-loras", 1),
    ("max_lora_rank", "--max-lora-rank", 16), ("limit_mm_per_prompt", "--limit-mm-per-prompt", None),
    ("cpu_offload_bytes", "--cpu-offload-gb", 0),
)  # fmt: skip


def command_line(model: str, settings: VllmSettings, given: Iterable[str]) -> str:
    """``vllm serve`` with the settings named in ``given``, each spelled as vLLM spells it."""
    words, names = ["vllm", "serve", model], set(given)
    for name, flag, default in _FLAGS:
        value = getattr(settings, name)
        if name not in names or value is None or value == default:
            continue
        words += _words(name, flag, value)
    return shlex.join(words)


def _words(name: str, flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if name == "cpu_offload_bytes":
        value = value / GIB
    return [flag, f"{value:.4g}" if isinstance(value, float) else str(value)]


def budget_of(plan: MemoryPlan) -> Budget:
    """The fullest GPU's bytes as parts of its whole."""
    # A prior was measured on another start, often on another device.
    not_free = "CUDA context" if plan.settings.device_free_bytes is None else "not free at the start"
    prior = "prior" if plan.settings.correction is None else "measured"
    rows = (
        ("weights", plan.weights_bytes, "solved"), ("draft model", plan.draft_weights_bytes, "solved"),
        ("LoRA adapters", plan.adapter_bytes, "solved"), ("activations", plan.peak_activation_bytes, prior),
        ("non-torch", plan.non_torch_bytes, prior), ("CUDA graphs", plan.cudagraph_bytes, prior),
        ("KV cache", max(0, plan.kv_cache_pool_bytes), "solved"), (not_free, plan.context_bytes, "prior"),
    )  # fmt: skip
    parts = [BudgetPart(name, size, source) for name, size, source in rows if size > 0]
    free = plan.settings.gpu_total_bytes - sum(part.bytes for part in parts)
    if free > 0:
        parts.append(BudgetPart("free", free, "solved"))
    return Budget(plan.settings.gpu_total_bytes, tuple(parts))


def to_record(plan: MemoryPlan) -> dict[str, Any]:
    """The plan as the JSON contract has it, sizes in bytes per GPU."""
    return {
        "schema": SCHEMA,
        "model": plan.model,
        "engine": "vllm",
        "engine_version": str(plan.settings.version),
        "gpu_total_bytes": plan.settings.gpu_total_bytes,
        "weights_bytes": plan.weights_bytes,
        "draft_weights_bytes": plan.draft_weights_bytes,
        "adapter_bytes": plan.adapter_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_pool_bytes": plan.kv_cache_pool_bytes,
        "kv_cache_blocks": plan.kv_cache_blocks,
        "kv_cache_block_tokens": plan.block_tokens,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": plan.max_concurrency,
        "peak_activation_bytes": plan.peak_activation_bytes,
        "prompt_logprobs_bytes": plan.prompt_logprobs_bytes,
        "cudagraph_bytes": plan.cudagraph_bytes,
        "non_torch_bytes": plan.non_torch_bytes,
        "context_bytes": plan.context_bytes,
        "max_model_len": plan.settings.max_model_len,
        "largest_max_model_len": plan.longest_request_tokens,
        "max_num_seqs": plan.settings.max_num_seqs,
        "max_num_batched_tokens": plan.settings.max_num_batched_tokens,
        "gpu_memory_utilization": plan.settings.gpu_memory_utilization,
        "fits": plan.fits,
        "margin_bytes": plan.margin_bytes,
        "reasons": list(plan.reasons),
        "assumptions": list(plan.assumptions),
        "uncertainty_bytes": plan.uncertainty_bytes,
    }


def generate_record(plan: GeneratePlan) -> dict[str, Any]:
    """A planned call of ``generate`` under the same contract; what only an engine has is 0."""
    return {
        "schema": SCHEMA,
        "model": plan.model,
        "engine": "transformers",
        "gpu_total_bytes": plan.gpu_total_bytes,
        "weights_bytes": plan.weights_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_pool_bytes": plan.kv_cache_bytes,
        "kv_cache_tokens": plan.batch_size * plan.num_beams * (plan.prompt_tokens + plan.max_new_tokens),
        "max_concurrency": float(plan.largest_batch_size),
        "largest_batch_size": plan.largest_batch_size,
        "peak_activation_bytes": max(0, plan.peak_bytes - plan.weights_bytes - plan.kv_cache_bytes),
        "peak_allocated_bytes": plan.peak_bytes,
        "peak_reserved_bytes": plan.reserved_bytes,
        "cudagraph_bytes": 0,
        "non_torch_bytes": 0,
        "context_bytes": plan.context_bytes,
        "max_model_len": plan.prompt_tokens + plan.max_new_tokens,
        "batch_size": plan.batch_size,
        "prompt_tokens": plan.prompt_tokens,
        "max_new_tokens": plan.max_new_tokens,
        "fits": plan.fits,
        "traced": plan.traced,
        "assumptions": list(plan.assumptions),
        "uncertainty_bytes": plan.uncertainty_bytes,
    }


def to_json(record: dict[str, Any]) -> str:
    """One line of strict JSON."""
    return json.dumps(record, allow_nan=False)


def print_plan(console: Console, plan: MemoryPlan, advice: Sequence[str]) -> None:
    """The budget with its bar, what the KV cache holds, whether it fits and why not, and the command that does."""
    from rich.table import Table
    from rich.text import Text

    settings = plan.settings
    utf = console.encoding.lower().startswith("utf")
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    head = f"{plan.model}, vLLM {settings.version}, {format_gib(settings.gpu_total_bytes)}"
    console.print(Text(f"{head} a GPU, {ranks} GPU{'s' if ranks > 1 else ''}", style="bold"), soft_wrap=True)
    console.print(Bar(budget_of(plan), ascii_only=not utf, table=True))
    if plan.prompt_logprobs_bytes:
        console.print(
            f"prompt logprobs take up to {format_gib(plan.prompt_logprobs_bytes)} more, which no start reserves"
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    rows = (
        ("KV cache", f"{format_gib(plan.kv_cache_pool_bytes)} ({'+-' if not utf else '±'} {format_gib(plan.uncertainty_bytes)})"),
        ("a token", f"{plan.kv_bytes_per_token:,} bytes"),
        ("tokens", f"{plan.kv_cache_tokens:,} in {plan.kv_cache_blocks:,} blocks of {plan.block_tokens}"),
        ("requests at once", f"{plan.max_concurrency:.2f} of {settings.max_model_len:,} tokens"),
        ("longest request", f"{plan.longest_request_tokens:,} tokens"),
    )  # fmt: skip
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    verdict = Text("fits", style="bold green") if plan.fits else Text("does not fit: ", style="bold red")
    if plan.fits and not plan.has_margin:
        verdict = Text("fits, but within what is uncertain", style="bold yellow")
        verdict.append(
            f": {format_gib(plan.margin_bytes)} to spare, {format_gib(plan.uncertainty_bytes)} unsure", style="not bold"
        )
    console.print(verdict if plan.fits else verdict.append("; ".join(plan.reasons), style="not bold"), soft_wrap=True)
    for line in advice:
        console.print(Text(line), soft_wrap=True)
    for line in plan.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)


def print_sweep(console: Console, name: str, plans: Sequence[tuple[Any, MemoryPlan | str]]) -> None:
    """One row for each value of a setting; why the engine would refuse a value stands below the table."""
    titles = (name, "weights", "activations", "KV cache", "KV tokens", "at once", "fits")
    _print_rows(console, titles, (
        (str(value), *["-"] * 5, "refused") if isinstance(plan, str) else (
            str(value), format_gib(plan.weights_bytes), format_gib(plan.peak_activation_bytes),
            format_gib(plan.kv_cache_pool_bytes), f"{plan.kv_cache_tokens:,}", f"{plan.max_concurrency:.2f}", _yes(plan.fits),
        )
        for value, plan in plans
    ))  # fmt: skip
    for value, plan in plans:
        if isinstance(plan, str):
            console.print(f"{value}: {plan}", markup=False)


def _print_rows(console: Console, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def print_generate(console: Console, plan: GeneratePlan) -> None:
    """A planned call of ``generate``: its bar, its peak, and how many rows would fit."""
    from rich.text import Text

    utf = console.encoding.lower().startswith("utf")
    head = f"{plan.model}, transformers generate, {plan.batch_size} rows of {plan.prompt_tokens:,} + {plan.max_new_tokens:,} tokens"
    console.print(Text(f"{head}, {format_gib(plan.gpu_total_bytes)}", style="bold"), soft_wrap=True)
    kv = min(plan.kv_cache_bytes, plan.peak_bytes - plan.weights_bytes)
    rows = (
        ("weights", plan.weights_bytes), ("KV cache", kv), ("activations", plan.peak_bytes - plan.weights_bytes - kv),
        ("reserved by torch, unused", plan.reserved_bytes - plan.peak_bytes), ("CUDA context", plan.context_bytes),
        ("free", plan.gpu_total_bytes - plan.reserved_bytes - plan.context_bytes),
    )  # fmt: skip
    parts = tuple(BudgetPart(name, size, "solved") for name, size in rows if size > 0)
    console.print(Bar(Budget(plan.gpu_total_bytes, parts), ascii_only=not utf, table=True))
    how = "the model's own code under fake tensors" if plan.traced else "closed form"
    console.print(
        f"peak allocated {format_gib(plan.peak_bytes)} ({how}), reserved {format_gib(plan.reserved_bytes)}",
        soft_wrap=True,
    )
    verdict = ("fits", "bold green") if plan.fits else ("does not fit", "bold red")
    console.print(
        Text(verdict[0], style=verdict[1]).append(
            f"; largest batch that does: {plan.largest_batch_size}", style="not bold"
        )
    )
    for line in plan.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)


def print_generate_sweep(console: Console, name: str, plans: Sequence[tuple[Any, GeneratePlan]]) -> None:
    """One row for each value of a setting of the call."""
    titles = (name, "weights", "KV cache", "allocated", "reserved", "largest batch", "fits")
    _print_rows(console, titles, (
        (
            str(value), format_gib(plan.weights_bytes), format_gib(plan.kv_cache_bytes), format_gib(plan.peak_bytes),
            format_gib(plan.reserved_bytes), str(plan.largest_batch_size), _yes(plan.fits),
        )
        for value, plan in plans
    ))  # fmt: skip
