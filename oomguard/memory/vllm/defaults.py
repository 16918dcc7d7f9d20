"""What vLLM fills in where the user named nothing: rows and tokens by the device, the length by the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oomguard.memory.constants import tables
from oomguard.memory.model.shape import ModelShape
from oomguard.memory.vllm.start import VllmSettings
from oomguard.surfaces import default_value, device_size


def with_defaults(settings: VllmSettings, shape: ModelShape, assumed: list[str]) -> VllmSettings:
    """Return the settings as the engine would fill them in; add a line to ``assumed`` for each."""
    on_cpu = settings.device == "cpu"
    version = str(settings.version)
    size = "cpu" if on_cpu else device_size("vllm", settings.gpu_total_bytes, settings.gpu_name, version)
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size if on_cpu else 1
    changes: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(settings, name) is None:
            default = default_value(name, "vllm", version, device_size=size)
            changes[name] = int(default or 1) * ranks
            assumed.append(f"{name} {changes[name]}: vllm serve's default on a device of this size")
    if settings.max_model_len is None:
        changes["max_model_len"] = shape.default_length or int(tables()["defaults"]["length_of_no_key_tokens"])
        assumed.append(f"max_model_len {changes['max_model_len']}: the model's own")
    filled = replace(settings, **changes)
    # Only what the user left alone is fitted to the other (vllm/engine/arg_utils.py, 0.32).
    if "max_num_batched_tokens" in changes:
        most = (filled.max_num_seqs or 1) * (filled.max_model_len or 1)
        filled = replace(filled, max_num_batched_tokens=min(most, filled.max_num_batched_tokens or most))
    if "max_num_seqs" in changes:
        filled = replace(filled, max_num_seqs=min(filled.max_num_seqs or 1, filled.max_num_batched_tokens or 1))
    return filled


def most_default_rows(given: VllmSettings, filled: VllmSettings) -> int:
    """Return the requests that may run: those given, else the most that vLLM fills in on a device of this kind.

    On the CPU backend ``LLM`` takes twice the rows of a server, and a log does not say which of the two it was.
    """
    rows = filled.max_num_seqs or 1
    on_cpu = given.device == "cpu" and given.max_num_seqs is None
    return 2 * rows if on_cpu and rows < (filled.max_num_batched_tokens or 0) else rows
