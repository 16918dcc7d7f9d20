"""Show a planned engine start or ``generate`` call: table, bar, JSON, and fitting command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.errors import UsageError
from oomguard.core.facts import GIB, FactValue, format_gib
from oomguard.core.incident import Budget, BudgetPart
from oomguard.core.redact import mask_command
from oomguard.core.settings import as_flag
from oomguard.estimate import Fit
from oomguard.estimate.start.start import NO_IMAGES, Stage, StartBudget
from oomguard.report.bar import BudgetBar

SCHEMA: Final = 1  # of the contract, as in report/json.py

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from oomguard.estimate.call.call_budget import CallBudget
    from oomguard.planning.plan import SolvedSetting
    from oomguard.planning.start import StartPlan


def call_record(call: CallBudget) -> dict[str, Any]:
    """Return a call's budget as the contract's object, in bytes; engine-only values are 0."""
    return {
        "schema": SCHEMA,
        "model": call.model,
        "engine": "transformers",
        "gpu_total_bytes": call.gpu_total_bytes,
        "weights_bytes": call.weights_bytes,
        "kv_bytes_per_token": call.kv_bytes_per_token,
        "kv_cache_pool_bytes": call.kv_cache_bytes,
        "kv_cache_tokens": call.batch_size
        * call.num_beams
        * (call.prompt_tokens + call.max_new_tokens),
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
        "fit": call.fit,
        "fits": call.fits,
        "traced": call.traced,
        "assumptions": list(call.assumptions),
        "uncertainty_bytes": call.uncertainty_bytes,
    }


def refusal_record(model: str, error: UsageError) -> dict[str, Any]:
    """Return the reason why there is no plan as the contract's object."""
    return {"schema": SCHEMA, "model": model, "error": str(error), "hint": error.hint}


def print_call_budget(console: Console, call: CallBudget) -> None:
    """Print whether a call fits, its bar, its peak, and the largest batch that fits."""
    from rich.text import Text

    utf = console.encoding.lower().startswith("utf")
    spare = call.spare_bytes
    if call.fit == "yes":
        why = f": {format_gib(spare)} to spare; largest batch that fits: {call.largest_batch_size}"
    elif call.fit == "no":
        why = f": {format_gib(-spare)} is missing"
    else:
        why = f": {_spare(spare)}, but {format_gib(call.uncertainty_bytes)} is uncertain"
    console.print(verdict(call.fit, why), soft_wrap=True)
    head = (
        f"{call.model}, transformers generate, {call.batch_size} rows of {call.prompt_tokens:,} + "
        f"{call.max_new_tokens:,} tokens"
    )
    console.print(Text(f"{head}, {format_gib(call.gpu_total_bytes)}", style="bold"), soft_wrap=True)
    console.print(BudgetBar(budget_of_call(call), ascii_only=not utf, table=True))
    peak = _range(call.peak_bytes, call.uncertainty_bytes, call.uncertainty_bytes)
    if call.traced:
        how = "the model's own code under fake tensors"
    else:
        how = "closed form"
    console.print(
        f"peak allocated {peak} ({how}), reserved {format_gib(call.reserved_bytes)}",
        soft_wrap=True,
    )
    for line in call.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)
    if call.fit != "yes" and call.largest_batch_size:
        console.print(f"largest batch that fits: {call.largest_batch_size}")
    # After a trace, no more exact method is left.
    if call.fit == "unsure" and not call.traced:
        console.print("to decide: add --trace, which runs the model's own code", soft_wrap=True)


_WORDS: Final[Mapping[Fit, tuple[str, str]]] = {
    "yes": ("fits", "bold green"),
    "no": ("does not fit", "bold red"),
    "unsure": ("unsure", "bold yellow"),
}


def verdict(fit: Fit, why: str) -> Text:
    """Return the first line of a plan: whether it fits, and what follows the verdict."""
    from rich.text import Text

    words, style = _WORDS[fit]
    return Text(words, style=style).append(why, style="not bold")


def _spare(size_bytes: int) -> str:
    if size_bytes < 0:
        return f"{format_gib(-size_bytes)} is missing"
    return f"{format_gib(size_bytes)} to spare"


def _range(size_bytes: int, below_bytes: int, above_bytes: int) -> str:
    """Return a size and its range: ``60.20 GiB, between 58.20 and 62.20``."""
    if not below_bytes and not above_bytes:
        return format_gib(size_bytes)
    # A wide range below a small pool would otherwise start at a negative size.
    low = max(0, size_bytes - below_bytes) / GIB
    high = (size_bytes + above_bytes) / GIB
    return f"{size_bytes / GIB:.2f} GiB, between {low:.2f} and {high:.2f}"


def budget_of_call(call: CallBudget) -> Budget:
    """Return the memory of a call's GPU as parts."""
    # The peak may come before the KV cache is full, and no part may exceed the whole.
    kv = min(call.kv_cache_bytes, call.peak_bytes - call.weights_bytes)
    # The parts must add up to the device, so each row has only what the rows before it leave.
    rows = (
        ("weights", call.weights_bytes),
        ("KV cache", kv),
        ("activations", call.peak_bytes - call.weights_bytes - kv),
        ("reserved by torch, unused", call.reserved_bytes - call.peak_bytes),
        ("CUDA context", call.cuda_context_bytes),
        ("free", call.gpu_total_bytes - call.reserved_bytes - call.cuda_context_bytes),
    )
    # A call that does not fit has negative free memory, and a bar cannot show that.
    parts = []
    for name, size in rows:
        if size > 0:
            parts.append(BudgetPart(name, size, "solved"))
    return Budget(call.gpu_total_bytes, tuple(parts))


def budget_of(start: StartBudget) -> Budget:
    """Return the memory of the fullest GPU as parts."""
    # Without the free memory of a real start, only the CUDA context is known to be missing.
    if start.settings.device_free_bytes is None:
        not_free = "CUDA context"
    else:
        not_free = "not free at the start"
    # A correction comes from a log of the user's own start.
    if start.settings.correction is None:
        prior = "prior"
    else:
        prior = "measured"
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
    parts = []
    for name, size, source in rows:
        if size > 0:
            parts.append(BudgetPart(name, size, source))
    # The reserve is free on the device, so the bar does not show it as a part.
    free = start.settings.gpu_total_bytes - sum(part.bytes for part in parts)
    if free > 0:
        parts.append(BudgetPart("free", free, "solved"))
    return Budget(start.settings.gpu_total_bytes, tuple(parts))


def start_record(start: StartBudget) -> dict[str, Any]:
    """Return a start's budget as the contract's object, in bytes per GPU."""
    parts = []
    for part in budget_of(start).parts:
        parts.append({"name": part.name, "bytes": part.bytes, "source": part.source})
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
        "fit": start.fit,
        "fits": start.fits,
        "margin_bytes": start.margin_bytes,
        "reasons": list(start.reasons),
        "assumptions": list(start.assumptions),
        "uncertainty_bytes": start.uncertainty_bytes,
        "uncertainty_above_bytes": start.uncertainty_above_bytes,
        "more_bytes": start.more_bytes,
        "uncertain_part": start.uncertain_part,
        "unread": list(start.unread),
        "parts": parts,
    }


def _stage_record(stage: Stage) -> dict[str, int]:
    return {
        "stage": stage.number,
        "weights_bytes": stage.weights_bytes,
        "peak_activation_bytes": stage.peak_activation_bytes,
        "kv_cache_pool_bytes": stage.pool_bytes,
    }


def plan_record(plan: StartPlan) -> dict[str, Any]:
    """Return a planned start as the contract's object: budget, fitting command and changes."""
    changes = []
    for patch in plan.changes:
        changes.append({"setting": patch.setting, "from": patch.old, "to": patch.new})
    record = {**start_record(plan.budget), "command": _shown(plan.command), "changes": changes}
    if plan.unsure is None:
        record["unsure"] = None
    else:
        record["unsure"] = asdict(plan.unsure)
    if plan.needed is None:
        return record
    return {**record, "smallest": asdict(plan.needed)}


def solved_record(solved: SolvedSetting) -> dict[str, Any]:
    """Return a plan with a solved setting as the contract's object."""
    found = {"setting": solved.setting, "value": solved.value}
    return {**plan_record(solved.plan), "solved": found}


def print_solved_plan(console: Console, solved: SolvedSetting) -> None:
    """Print the solved value, and the plan with it."""
    from rich.text import Text

    # Each GPU costs money, but more of any other setting serves more requests.
    which = "smallest" if solved.setting == "tensor_parallel_size" else "largest"
    if solved.value is None:
        line = Text(f"no value of {solved.setting} surely fits", style="bold red")
    else:
        value = _text(solved.value)
        line = Text(f"{solved.setting} {value} is the {which} that surely fits", style="bold green")
    console.print(line, soft_wrap=True)
    print_start_plan(console, solved.plan)


def _shown(command: str | None) -> str | None:
    """Return a command without the secrets in its flags; None stays None."""
    if command is None:
        return None
    # The user pastes this command, so paths in the home folder stay.
    return shlex.join(mask_command(shlex.split(command), keep_homes=True))


def print_start_plan(console: Console, plan: StartPlan) -> None:
    """Print whether it fits, the budget, the KV cache, and last a command that fits."""
    from rich.text import Text

    start = plan.budget
    utf = console.encoding.lower().startswith("utf")
    settings = start.settings
    ranks = (
        settings.tensor_parallel_size
        * settings.pipeline_parallel_size
        * settings.data_parallel_size
    )
    console.print(verdict(plan.fit, _why(plan)), soft_wrap=True)
    head = f"{start.model}, vLLM {settings.version}, {format_gib(settings.gpu_total_bytes)}"
    console.print(
        Text(f"{head} a GPU, {ranks} GPU{'s' if ranks > 1 else ''}", style="bold"), soft_wrap=True
    )
    console.print(BudgetBar(budget_of(start), ascii_only=not utf, table=True))
    # vLLM's profiling run has no such request, so these bytes are in no part of the budget.
    if start.prompt_logprobs_bytes:
        console.print(
            f"prompt logprobs take up to {format_gib(start.prompt_logprobs_bytes)} more, and no "
            "start reserves them"
        )
    console.print(_kv_cache(start))
    for line in start.assumptions:
        console.print(Text(f"assumed: {line}", style="dim"), soft_wrap=True)
    for line in _advice(plan):
        console.print(Text(line), soft_wrap=True)


def _why(plan: StartPlan) -> str:
    """Return what the first line says after the verdict."""
    start = plan.budget
    if plan.unsure is not None:
        return f": {plan.unsure.because}"
    if plan.fit == "no":
        return f": {'; '.join(start.reasons)}"
    length = start.settings.max_model_len
    spare = format_gib(start.spare_bytes)
    return f": {spare} to spare beside one request of {length:,} tokens"


def _kv_cache(start: StartBudget) -> Table:
    """Return the table of KV cache figures."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    # A size that the user set is exact, so it has no range.
    if start.settings.kv_cache_memory_bytes is None:
        pool = _range(
            start.kv_cache_pool_bytes, start.uncertainty_bytes, start.uncertainty_above_bytes
        )
    else:
        pool = format_gib(start.kv_cache_pool_bytes)
    table.add_row("KV cache", pool)
    # The other rows depend on a layout that was not read.
    if start.unread:
        return table
    table.add_row("a token", f"{start.kv_bytes_per_token:,} bytes")
    table.add_row(
        "tokens",
        f"{start.kv_cache_tokens:,} in {start.kv_cache_blocks:,} blocks of {start.block_tokens}",
    )
    table.add_row(
        "requests at once",
        f"{start.max_concurrency:.2f} of {start.settings.max_model_len:,} tokens",
    )
    table.add_row("longest request", f"{start.longest_request_tokens:,} tokens")
    return table


def _advice(plan: StartPlan) -> Iterator[str]:
    """Yield what would decide, and the fitting command or the smallest hardware that would fit."""
    if plan.unsure is not None:
        yield f"to decide: {plan.unsure.decides}. {plan.unsure.how}"
    if plan.command is not None:
        if plan.changes:
            yield "with these changes it fits:"
        for patch in plan.changes:
            yield f"  {patch.setting}: {_text(patch.old)} -> {_text(patch.new)}"
        yield str(_shown(plan.command))
    # No setting helps, so only other hardware or prompts without images can.
    elif (needed := plan.needed) is not None:
        if needed.tensor_parallel_size:
            yield (
                "it would fit with "
                f"{as_flag('tensor_parallel_size', needed.tensor_parallel_size, 'vllm')}"
            )
        if needed.gpu_total_bytes:
            yield f"it would fit on a GPU of {format_gib(needed.gpu_total_bytes)}"
        if needed.without_images:
            yield (
                "it would fit if no prompt has images: "
                f"{as_flag('limit_mm_per_prompt', NO_IMAGES, 'vllm')}"
            )
        if not any(asdict(needed).values()):
            yield "neither a larger GPU nor more GPUs would help"


def _text(value: FactValue | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


# The tables of a sweep have one row for each value of a setting.

_START_TITLES = ("weights", "activations", "KV cache", "KV tokens", "at once", "fits")
_CALL_TITLES = ("weights", "KV cache", "allocated", "reserved", "largest batch", "fits")


def sweep_records(
    setting: str, rows: Iterable[tuple[str, StartBudget | str]]
) -> Iterator[dict[str, Any]]:
    """Yield a record for each value, with the reason if the engine would refuse it."""
    for value, start in rows:
        refused = {
            "schema": SCHEMA,
            setting: value,
            "fit": "no",
            "fits": False,
            "reasons": [start],
        }
        yield refused if isinstance(start, str) else start_record(start)


def print_start_sweep(
    console: Console, setting: str, rows: Sequence[tuple[str, StartBudget | str]]
) -> None:
    """Print one row for each value, and below the table why the engine would refuse a value."""
    _print_rows(
        console, (setting, *_START_TITLES), ((value, *_start_cells(start)) for value, start in rows)
    )
    for value, start in rows:
        if isinstance(start, str):
            console.print(f"{value}: {start}", markup=False)


def _start_cells(start: StartBudget | str) -> Iterator[str]:
    if isinstance(start, str):
        yield from ["-"] * (len(_START_TITLES) - 1)
        yield "refused"
        return
    yield format_gib(start.weights_bytes)
    yield format_gib(start.peak_activation_bytes)
    yield format_gib(start.kv_cache_pool_bytes)
    yield f"{start.kv_cache_tokens:,}"
    yield f"{start.max_concurrency:.2f}"
    yield start.fit


def print_call_sweep(
    console: Console, setting: str, rows: Sequence[tuple[str, CallBudget]]
) -> None:
    """Print one row for each value of a setting of the call."""
    _print_rows(
        console, (setting, *_CALL_TITLES), ((value, *_call_cells(call)) for value, call in rows)
    )


def _call_cells(call: CallBudget) -> Iterator[str]:
    yield format_gib(call.weights_bytes)
    yield format_gib(call.kv_cache_bytes)
    yield format_gib(call.peak_bytes)
    yield format_gib(call.reserved_bytes)
    yield str(call.largest_batch_size)
    yield call.fit


# With a longer title of the setting, a sweep would be wider than 80 columns.
_LONGEST_TITLE: Final = 16


def _in_two_lines(title: str) -> str:
    """Return a long name of a setting with a line break near its middle."""
    if len(title) <= _LONGEST_TITLE or "_" not in title:
        return title
    middle = len(title)
    for i, letter in enumerate(title, 1):
        if letter == "_" and abs(i - len(title) / 2) < abs(middle - len(title) / 2):
            middle = i
    return f"{title[:middle]}\n{title[middle:]}"


def _print_rows(console: Console, titles: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        # A number in two lines is hard to read.
        table.add_column(_in_two_lines(title), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
