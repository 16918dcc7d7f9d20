"""A planned call of transformers' ``generate`` for a terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomguard.facts import format_gib
from oomguard.incident import Budget, BudgetPart
from oomguard.memory.generate.call import CallBudget
from oomguard.report.json import SCHEMA
from oomguard.report.terminal_bar import BudgetBar

if TYPE_CHECKING:
    from rich.console import Console


def call_record(call: CallBudget) -> dict[str, Any]:
    """Return a budget as the JSON contract has it, sizes in bytes; what only an engine has is 0."""
    return {
        "schema": SCHEMA,
        "model": call.model,
        "engine": "transformers",
        "gpu_total_bytes": call.gpu_total_bytes,
        "weights_bytes": call.weights_bytes,
        "kv_bytes_per_token": call.kv_bytes_per_token,
        "kv_cache_pool_bytes": call.kv_cache_bytes,
        "kv_cache_tokens": call.batch_size * call.num_beams * (call.prompt_tokens + call.max_new_tokens),
        "max_concurrency": float(call.largest_batch_size),
        "largest_batch_size": call.largest_batch_size,
        "peak_activation_bytes": max(0, call.peak_bytes - call.weights_bytes - call.kv_cache_bytes),
        "peak_allocated_bytes": call.peak_bytes,
        "peak_reserved_bytes": call.reserved_bytes,
        "cudagraph_bytes": 0,
        "non_torch_bytes": 0,
        "context_bytes": call.cuda_context_bytes,
        "max_model_len": call.prompt_tokens + call.max_new_tokens,
        "batch_size": call.batch_size,
        "prompt_tokens": call.prompt_tokens,
        "max_new_tokens": call.max_new_tokens,
        "fits": call.fits,
        "traced": call.traced,
        "assumptions": list(call.assumptions),
        "uncertainty_bytes": call.uncertainty_bytes,
    }


def print_call_budget(console: Console, call: CallBudget) -> None:
    """Print a budget's bar, its peak, whether it fits, and how many rows would."""
    from rich.text import Text

    utf = console.encoding.lower().startswith("utf")
    head = f"{call.model}, transformers generate, {call.batch_size} rows of {call.prompt_tokens:,} + {call.max_new_tokens:,} tokens"
    console.print(Text(f"{head}, {format_gib(call.gpu_total_bytes)}", style="bold"), soft_wrap=True)
    kv = min(call.kv_cache_bytes, call.peak_bytes - call.weights_bytes)
    rows = (
        ("weights", call.weights_bytes),
        ("KV cache", kv),
        ("activations", call.peak_bytes - call.weights_bytes - kv),
        ("reserved by torch, unused", call.reserved_bytes - call.peak_bytes),
        ("CUDA context", call.cuda_context_bytes),
        ("free", call.gpu_total_bytes - call.reserved_bytes - call.cuda_context_bytes),
    )
    parts = tuple(BudgetPart(name, size, "solved") for name, size in rows if size > 0)
    console.print(BudgetBar(Budget(call.gpu_total_bytes, parts), ascii_only=not utf, table=True))
    how = "the model's own code under fake tensors" if call.traced else "closed form"
    console.print(
        f"peak allocated {format_gib(call.peak_bytes)} ({how}), reserved {format_gib(call.reserved_bytes)}",
        soft_wrap=True,
    )
    verdict = ("fits", "bold green") if call.fits else ("does not fit", "bold red")
    console.print(
        Text(verdict[0], style=verdict[1]).append(
            f"; largest batch that does: {call.largest_batch_size}", style="not bold"
        )
    )
    for line in call.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)
