"""What vLLM fills in where the user named nothing: rows and tokens by the device, the length by the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from oomguard.memory.constants import tables
from oomguard.memory.model_shape import ModelShape
from oomguard.memory_plan import VllmSettings

_LENGTH_OF_NO_KEY: Final = 2048  # vllm/config/model.py


def with_defaults(settings: VllmSettings, shape: ModelShape, assumed: list[str]) -> VllmSettings:
    """The settings as the engine would fill them in; what was assumed is added to ``assumed``."""
    known = tables()["defaults"]
    total = settings.gpu_total_bytes
    size = (
        "huge" if total >= known["huge_device_bytes"] else "large" if total >= known["large_device_bytes"] else "small"
    )
    if settings.gpu_name is not None and any(name in settings.gpu_name.lower() for name in known["small_devices"]):
        size = "small"
    batch = dict(known[size])
    if settings.device == "cpu":
        world = settings.tensor_parallel_size * settings.pipeline_parallel_size
        batch = {name: value * world for name, value in known["cpu"].items()}
    changes: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(settings, name) is None:
            changes[name] = batch[name]
            assumed.append(f"{name} {batch[name]}: vllm serve's default on a device of this size")
    if settings.max_model_len is None:
        changes["max_model_len"] = shape.default_length or _LENGTH_OF_NO_KEY
        assumed.append(f"max_model_len {changes['max_model_len']}: the model's own")
    filled = replace(settings, **changes)
    # Only what the user left alone is fitted to the other (vllm/engine/arg_utils.py, 0.32).
    if "max_num_batched_tokens" in changes:
        most = (filled.max_num_seqs or 1) * (filled.max_model_len or 1)
        filled = replace(filled, max_num_batched_tokens=min(most, filled.max_num_batched_tokens or most))
    if "max_num_seqs" in changes:
        filled = replace(filled, max_num_seqs=min(filled.max_num_seqs or 1, filled.max_num_batched_tokens or 1))
    return filled
