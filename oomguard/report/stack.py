"""Show where the services of a stack go, on a terminal and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oomguard.core.facts import format_gib
from oomguard.planning.start import serve_command
from oomguard.report.json import SCHEMA
from oomguard.report.plan import verdict

if TYPE_CHECKING:
    from rich.console import Console

    from oomguard.planning.stack import PlacedService, StackPlan


def command_of(service: PlacedService) -> str:
    """Return the command that starts a service on its GPUs with its share."""
    request = service.request
    # vLLM's default would give each service almost the whole GPU.
    named = request.given | {"gpu_memory_utilization"}
    own = serve_command(request.path, request.settings, named, request.kept_words)
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, service.gpus))} {own}"


def stack_record(stack: StackPlan) -> dict[str, Any]:
    """Return a stack as one JSON object; sizes are in bytes, services in the order of starts."""
    services = []
    for service in stack.services:
        services.append(
            {
                "name": service.name,
                "gpus": list(service.gpus),
                "gpu_memory_utilization": service.request.settings.gpu_memory_utilization,
                "needed_bytes": service.needed_bytes,
                "kv_cache_pool_bytes": service.budget.kv_cache_pool_bytes,
                "max_concurrency": service.budget.max_concurrency,
                "fit": service.budget.fit,
                "command": command_of(service),
            }
        )
    return {
        "schema": SCHEMA,
        "fit": stack.fit,
        "fits": stack.fit == "yes",
        "services": services,
        "missing": dict(stack.missing),
        "free_bytes": list(stack.free_bytes),
    }


def print_stack(console: Console, stack: StackPlan) -> None:
    """Print whether all services fit, one table, and the commands in the order of starts."""
    from rich.table import Table

    total = len(stack.services) + len(stack.missing)
    devices = "1 GPU"
    if len(stack.gpus) > 1:
        devices = f"{len(stack.gpus)} GPUs"
    why = f": {len(stack.services)} of {total} services have a place on {devices}"
    console.print(verdict(stack.fit, why), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("service")
    for head in ("GPU", "share", "takes", "KV cache", "at once"):
        table.add_column(head, justify="right")
    for service in stack.services:
        table.add_row(
            service.name,
            ", ".join(map(str, service.gpus)),
            f"{service.request.settings.gpu_memory_utilization:.3f}",
            format_gib(service.needed_bytes),
            format_gib(service.budget.kv_cache_pool_bytes),
            f"{service.budget.max_concurrency:.1f}",
        )
    # The last rows show what is left, so a user sees where one more service could go.
    for gpu, size in zip(stack.gpus, stack.free_bytes, strict=True):
        table.add_row("free", str(gpu.index), "", format_gib(size))
    console.print(table)
    for name, reason in stack.missing.items():
        console.print(f"{name}: no place: {reason}", markup=False, soft_wrap=True)
    # vLLM measures free memory as it starts, so two starts at once would see each other's parts.
    if len(stack.services) > 1:
        # Each start measures the memory that the earlier services left.
        console.print("Start them in this order, each when the one before it answers:")
    for service in stack.services:
        console.print(command_of(service), markup=False, soft_wrap=True)
