"""A planned start of vLLM as a table with a bar for a terminal, as JSON, and as the command that fits."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oomguard.budgeting.start import StartPlan
from oomguard.facts import FactValue, format_gib
from oomguard.incident import Budget, BudgetPart
from oomguard.memory.vllm.encoder_profile import NO_IMAGES
from oomguard.memory.vllm.start import Stage, StartBudget
from oomguard.report.json import SCHEMA
from oomguard.report.mask import mask_command
from oomguard.report.terminal_bar import BudgetBar
from oomguard.surfaces import as_flag

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def budget_of(start: StartBudget) -> Budget:
    """Return the fullest GPU's bytes as parts of its whole."""
    # A prior was measured on another start, often on another device.
    not_free = "CUDA context" if start.settings.device_free_bytes is None else "not free at the start"
    prior = "prior" if start.settings.correction is None else "measured"
    rows = (
        ("weights", start.weights_bytes, "solved"),
        ("draft model", start.draft_weights_bytes, "solved"),
        ("LoRA adapters", start.lora_bytes, "solved"),
        ("activations", start.peak_activation_bytes, prior),
        ("non-torch", start.non_torch_bytes, prior),
        ("CUDA graphs", start.cudagraph_bytes, prior),
        ("KV cache", max(0, start.kv_cache_pool_bytes), "solved"),
        (not_free, start.not_free_bytes, "prior"),
    )
    parts = [BudgetPart(name, size, source) for name, size, source in rows if size > 0]
    free = start.settings.gpu_total_bytes - sum(part.bytes for part in parts)
    if free > 0:
        parts.append(BudgetPart("free", free, "solved"))
    return Budget(start.settings.gpu_total_bytes, tuple(parts))


def start_record(start: StartBudget) -> dict[str, Any]:
    """Return a budget as the JSON contract has it, sizes in bytes per GPU."""
    return {
        "schema": SCHEMA,
        "model": start.model,
        "engine": "vllm",
        "engine_version": str(start.settings.version),
        "gpu_total_bytes": start.settings.gpu_total_bytes,
        "weights_bytes": start.weights_bytes,
        "draft_weights_bytes": start.draft_weights_bytes,
        "adapter_bytes": start.lora_bytes,
        "kv_bytes_per_token": start.kv_bytes_per_token,
        "kv_cache_pool_bytes": start.kv_cache_pool_bytes,
        "kv_cache_blocks": start.kv_cache_blocks,
        "kv_cache_block_tokens": start.block_tokens,
        "kv_cache_tokens": start.kv_cache_tokens,
        "max_concurrency": start.max_concurrency,
        "peak_activation_bytes": start.peak_activation_bytes,
        "compile_bytes": start.compile_bytes,
        "page_cache_bytes": start.page_cache_bytes,
        "kept_back_bytes": start.kept_back_bytes,
        "prompt_logprobs_bytes": start.prompt_logprobs_bytes,
        "cudagraph_bytes": start.cudagraph_bytes,
        "non_torch_bytes": start.non_torch_bytes,
        "context_bytes": start.not_free_bytes,
        "stages": [_stage_record(stage) for stage in start.stages],
        "max_model_len": start.settings.max_model_len,
        "largest_max_model_len": start.longest_request_tokens,
        "max_num_seqs": start.settings.max_num_seqs,
        "max_num_batched_tokens": start.settings.max_num_batched_tokens,
        "gpu_memory_utilization": start.settings.gpu_memory_utilization,
        "fits": start.fits,
        "margin_bytes": start.margin_bytes,
        "reasons": list(start.reasons),
        "assumptions": list(start.assumptions),
        "uncertainty_bytes": start.uncertainty_bytes,
    }


def _stage_record(stage: Stage) -> dict[str, int]:
    return {
        "stage": stage.number,
        "weights_bytes": stage.weights_bytes,
        "peak_activation_bytes": stage.peak_activation_bytes,
        "kv_cache_pool_bytes": stage.pool_bytes,
    }


def plan_record(plan: StartPlan) -> dict[str, Any]:
    """Return a planned start as the JSON contract has it: its budget, the command that fits, and what that changes."""
    changes = [{"setting": patch.setting, "from": patch.old, "to": patch.new} for patch in plan.changes]
    record = {**start_record(plan.budget), "command": _shown(plan.command), "changes": changes}
    return record if plan.needed is None else {**record, "smallest": asdict(plan.needed)}


def _shown(command: str | None) -> str | None:
    """Return a command without the secrets in the flags that it keeps."""
    return None if command is None else shlex.join(mask_command(shlex.split(command), keep_homes=True))


def print_start_plan(console: Console, plan: StartPlan) -> None:
    """Print the budget with its bar, what the KV cache holds, whether it fits and why not, and the command that does."""
    from rich.text import Text

    start, utf = plan.budget, console.encoding.lower().startswith("utf")
    settings = start.settings
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size * settings.data_parallel_size
    head = f"{start.model}, vLLM {settings.version}, {format_gib(settings.gpu_total_bytes)}"
    console.print(Text(f"{head} a GPU, {ranks} GPU{'s' if ranks > 1 else ''}", style="bold"), soft_wrap=True)
    console.print(BudgetBar(budget_of(start), ascii_only=not utf, table=True))
    if start.prompt_logprobs_bytes:
        console.print(
            f"prompt logprobs take up to {format_gib(start.prompt_logprobs_bytes)} more, which no start reserves"
        )
    console.print(_kv_cache(start, utf=utf))
    console.print(_verdict(start), soft_wrap=True)
    for line in _advice(plan):
        console.print(Text(line), soft_wrap=True)
    for line in start.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)


def _kv_cache(start: StartBudget, *, utf: bool) -> Table:
    """Return the table of what the KV cache holds."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    pool, uncertain = format_gib(start.kv_cache_pool_bytes), format_gib(start.uncertainty_bytes)
    table.add_row("KV cache", f"{pool} ({'±' if utf else '+-'} {uncertain})")
    table.add_row("a token", f"{start.kv_bytes_per_token:,} bytes")
    table.add_row("tokens", f"{start.kv_cache_tokens:,} in {start.kv_cache_blocks:,} blocks of {start.block_tokens}")
    table.add_row("requests at once", f"{start.max_concurrency:.2f} of {start.settings.max_model_len:,} tokens")
    table.add_row("longest request", f"{start.longest_request_tokens:,} tokens")
    return table


def _verdict(start: StartBudget) -> Text:
    from rich.text import Text

    if not start.fits:
        return Text("does not fit: ", style="bold red").append("; ".join(start.reasons), style="not bold")
    if start.has_margin:
        return Text("fits", style="bold green")
    spare, uncertain = format_gib(start.margin_bytes), format_gib(start.uncertainty_bytes)
    verdict = Text("fits, but within what is uncertain", style="bold yellow")
    return verdict.append(f": {spare} to spare, {uncertain} unsure", style="not bold")


def _advice(plan: StartPlan) -> Iterator[str]:
    """Yield what to change and the command that fits, else what would make it fit if no setting does."""
    if plan.command is not None:
        if plan.changes:
            yield "this fits:"
        for patch in plan.changes:
            yield f"  {patch.setting}: {_text(patch.old)} -> {_text(patch.new)}"
        yield str(_shown(plan.command))
    elif (needed := plan.needed) is not None:
        if needed.tensor_parallel_size:
            yield f"it would fit with {as_flag('tensor_parallel_size', needed.tensor_parallel_size, 'vllm')}"
        if needed.gpu_total_bytes:
            yield f"it would fit on a GPU of {format_gib(needed.gpu_total_bytes)}"
        if needed.without_images:
            yield f"it would fit where no prompt has images: {as_flag('limit_mm_per_prompt', NO_IMAGES, 'vllm')}"
        if not any(asdict(needed).values()):
            yield "no larger GPU and no more of them would help"


def _text(value: FactValue | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
