"""How much of a device is free when an engine starts, where its memory is not the engine's alone: WSL2, unified, time-sliced."""

from __future__ import annotations

from typing import Final

from oomguard.errors import SettingError
from oomguard.memory.constants import tables

KINDS: Final = ("discrete", "wsl2", "unified")


def others_margin_ratio() -> float:
    """Return the share of a device that other processes may still take between two looks at what is free."""
    return float(tables()["ceilings"]["others_margin_ratio"])


def pool_margin_bytes(total_bytes: float, *, is_on_host: bool) -> float:
    """Return what has to stay free beside a cache that takes all else of a device, or of a host."""
    margin = others_margin_ratio() * total_bytes
    return max(margin, float(tables()["ceilings"]["host_margin_bytes"])) if is_on_host else margin


def most_free_ratio() -> float:
    """Return the highest utilization to propose without a printed figure of what is free."""
    return float(tables()["ceilings"]["most_free_ratio"])


def kind_of(gpu_name: str | None, *, on_wsl2: bool = False) -> str:
    """Return the kind of memory of a GPU: unified by its name, else by the host."""
    plain = "".join(c for c in (gpu_name or "").lower() if c.isalnum())
    for row in tables()["ceiling"]:
        if any(name in plain for name in row["gpus"]):
            return str(row["kind"])
    return "wsl2" if on_wsl2 else "discrete"


def free_at_start(total_bytes: int, kind: str, replicas: int = 1) -> tuple[int | None, str]:
    """Return the bytes that are free for one engine, and what says so; None for all but the CUDA context.

    Args:
        total_bytes: the memory of the GPU.
        kind: one of ``KINDS``.
        replicas: engines that take turns on a time-sliced GPU; nothing but they themselves divides its memory.

    Raises:
        SettingError: the kind is not known.
    """
    if kind not in KINDS:
        raise SettingError(f"memory_kind is {kind!r}", hint=f"one of {', '.join(KINDS)}")
    ratio = next((float(row["free_ratio"]) for row in tables()["ceiling"] if row["kind"] == kind), None)
    if ratio is None and replicas == 1:
        return None, ""
    free = round((1.0 if ratio is None else ratio) * total_bytes / replicas)
    said = [f"{ratio:.0%} of a device with {kind} memory is free at a start"] if ratio is not None else []
    said += [f"{replicas} replicas share it evenly"] if replicas > 1 else []
    return free, ", ".join(said)
