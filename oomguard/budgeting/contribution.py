"""A measured start as a record that its user may contribute: numbers and the engine's own words, no name, path or host.

Constants are fitted on such records (benchmarks/fit_constants.py, which reads the same fields).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from oomguard.budgeting.start import start_of_log
from oomguard.engines.vllm.serve import serve_words
from oomguard.errors import InputError, UsageError
from oomguard.facts import GIB, format_gib, number_of
from oomguard.incident import EngineStart
from oomguard.memory.model.files import find_model
from oomguard.memory.model.model import read_model
from oomguard.memory.vllm.calibration import checked_correction, settings_of_start
from oomguard.memory.vllm.known_gpu import known_gpu
from oomguard.memory.vllm.start import VllmSettings

SCHEMA: Final = 1
_PRINTED: Final = {
    "model_weights_bytes": "weights_gib",
    "kv_cache_available_bytes": "available_kv_gib",
    "peak_activation_bytes": "peak_activation_gib",
    "non_torch_bytes": "non_torch_gib",
    "cudagraph_bytes": "graph_gib",
}
PRINTED_GIB: Final = frozenset(_PRINTED.values())
# Fields whose texts say what a model is made of; every other text in a configuration may be somebody's.
_WORDS: Final = frozenset(
    {
        *("architectures", "model_type", "torch_dtype", "dtype", "hidden_act", "hidden_activation", "layer_types"),
        *("quant_method", "quant_algo", "kv_cache_quant_algo", "fmt", "scale_fmt", "type", "strategy", "format"),
        *("rope_type", "expert_dtype", "version", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types"),
    }
)
_WORD: Final = re.compile(r"[\w.+*-]{1,60}")
_FIELD: Final = re.compile(r"[a-zA-Z_]\w{0,60}")


def contribution(log: str, model: str | None = None) -> dict[str, Any]:
    """Return the record of the last start that a log measured.

    Args:
        log: vLLM's start-up log.
        model: the model's folder, its config.json or its name on the hub; None: what the log names, where that is here.

    Raises:
        ConfigError: a number of the model's configuration is missing or absurd.
        InputError: the log measured no start, prints absurd figures, or its model cannot be found.
        SettingError: the start was of another model.
        UsageError: the log names no model that is here.
    """
    start = start_of_log(log)
    settings, name = settings_of_start(start), Path(log).name
    printed = _printed(start, settings, name)
    files = find_model(_model(start, model, name))
    read = read_model(files, dtype=settings.dtype, quantization=settings.quantization)
    checked_correction(start, settings, read, name)
    named = set(start.settings) & {field.name for field in fields(settings)}
    gpu = known_gpu(settings)
    return {
        "schema": SCHEMA,
        "vllm_version": str(settings.version),
        "gpu": None if gpu is None else gpu["name"],
        "gpu_total_gib": round(settings.gpu_total_bytes / GIB, 2),
        "config": without_names(files.config),
        "flags": serve_words(settings, named),
        "printed": printed,
    }


def _model(start: EngineStart, given: str | None, name: str) -> str:
    said = start.settings.get("model")
    if given is not None:
        return given
    if said is None or not Path(str(said.value)).exists():
        raise UsageError(f"{name} names no model that is here", hint="say which with --model FOLDER")
    return str(said.value)


def _printed(start: EngineStart, settings: VllmSettings, name: str) -> dict[str, float]:
    """Return the figures in GiB; raises InputError where they cannot be one start's on this device."""
    found = {}
    for fact, key in _PRINTED.items():
        size = number_of(start.facts, fact)
        if size is None:
            continue
        if not 0 <= size <= settings.gpu_total_bytes:
            total = format_gib(settings.gpu_total_bytes)
            raise InputError(
                f"{name}: {fact} is {format_gib(size)} on a device of {total}", hint="give the log of one start"
            )
        found[key] = round(size / GIB, 3)
    tokens = number_of(start.facts, "kv_cache_capacity_tokens")
    return found if tokens is None else {**found, "kv_tokens": round(tokens)}


def without_names(value: Any, field: str = "") -> Any:
    """Return a configuration without texts that may be somebody's: numbers stay, and words of fields that are known."""
    if isinstance(value, Mapping):
        kept = ((name, without_names(inner, name)) for name, inner in value.items() if _FIELD.fullmatch(str(name)))
        return {name: inner for name, inner in kept if inner is not None}
    if isinstance(value, list):
        return [inner for inner in (without_names(one, field) for one in value) if inner is not None]
    if isinstance(value, str):
        return value if field in _WORDS and _WORD.fullmatch(value) else None
    return value
