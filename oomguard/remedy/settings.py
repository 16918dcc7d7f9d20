"""The registry of settings: each knob's surfaces, the effect of turning it either way, and its defaults by version."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from oomguard.errors import SettingError
from oomguard.facts import YES_NO, FactValue, parse_size
from oomguard.incident import Effect

_PRESERVES, _REDUCES, _CHANGES = Effect.OUTPUT_PRESERVING, Effect.REDUCES_CAPACITY, Effect.CHANGES_OUTPUTS


@dataclass(frozen=True, slots=True)
class Setting:
    """One canonical knob. ``raised`` and ``lowered`` are the effects of a larger and a smaller value.

    For a yes/no setting ``raised`` is switching it on; for text both are the effect of any change. ``hard_limit``:
    a value that the user wrote is never raised without being told to. ``default_in``: the table of memory/constants.toml
    that has its defaults by version.
    """

    name: str
    type: Literal["int", "float", "bool", "str"]
    raised: Effect
    lowered: Effect
    flag: str | None = None
    kwarg: str | None = None
    env: str | None = None
    hard_limit: bool = False
    default_in: str | None = None


_ROWS: Final = (
    # vLLM; flags as `vllm serve` spells them.
    Setting("gpu_memory_utilization", "float", _PRESERVES, _REDUCES, "--gpu-memory-utilization", "gpu_memory_utilization",
            default_in="utilization"),
    Setting("max_model_len", "int", _REDUCES, _REDUCES, "--max-model-len", "max_model_len"),
    Setting("max_num_seqs", "int", _REDUCES, _REDUCES, "--max-num-seqs", "max_num_seqs"),
    Setting("max_num_batched_tokens", "int", _PRESERVES, _PRESERVES, "--max-num-batched-tokens", "max_num_batched_tokens"),
    Setting("kv_cache_memory_bytes", "int", _PRESERVES, _REDUCES, "--kv-cache-memory-bytes", "kv_cache_memory_bytes", hard_limit=True),
    Setting("enforce_eager", "bool", _PRESERVES, _PRESERVES, "--enforce-eager", "enforce_eager"),
    Setting("cudagraph_capture_sizes", "str", _PRESERVES, _PRESERVES, "--cudagraph-capture-sizes", None),
    Setting("enable_prefix_caching", "bool", _PRESERVES, _PRESERVES, "--enable-prefix-caching", "enable_prefix_caching"),
    Setting("limit_mm_per_prompt", "str", _REDUCES, _REDUCES, "--limit-mm-per-prompt", "limit_mm_per_prompt"),
    Setting("max_loras", "int", _REDUCES, _REDUCES, "--max-loras", "max_loras"),
    Setting("num_speculative_tokens", "int", _REDUCES, _REDUCES, None, None),
    Setting("kv_cache_dtype", "str", _CHANGES, _CHANGES, "--kv-cache-dtype", "kv_cache_dtype"),
    Setting("quantization", "str", _CHANGES, _CHANGES, "--quantization", "quantization"),
    Setting("dtype", "str", _CHANGES, _CHANGES, "--dtype", "dtype"),
    Setting("prompt_logprobs", "int", _CHANGES, _CHANGES, None, "prompt_logprobs"),
    Setting("tensor_parallel_size", "int", _PRESERVES, _PRESERVES, "--tensor-parallel-size", "tensor_parallel_size"),
    # SGLang, llama.cpp
    Setting("mem_fraction_static", "float", _PRESERVES, _REDUCES, "--mem-fraction-static", "mem_fraction_static"),
    Setting("ctx_size", "int", _REDUCES, _REDUCES, "--ctx-size", "n_ctx"),
    # transformers
    Setting("batch_size", "int", _PRESERVES, _PRESERVES, None, "batch_size"),
    Setting("prefill_chunk_size", "int", _PRESERVES, _PRESERVES, None, "prefill_chunk_size"),
    Setting("attn_implementation", "str", _PRESERVES, _PRESERVES, None, "attn_implementation"),
    Setting("cache_implementation", "str", _PRESERVES, _PRESERVES, None, "cache_implementation"),
    Setting("logits_to_keep", "int", _PRESERVES, _PRESERVES, None, "logits_to_keep"),
    Setting("max_new_tokens", "int", _CHANGES, _CHANGES, None, "max_new_tokens"),
    # either
    Setting("allocator_options", "str", _PRESERVES, _PRESERVES, None, None, "PYTORCH_ALLOC_CONF"),
    Setting("device", "str", _PRESERVES, _PRESERVES, None, None, "CUDA_VISIBLE_DEVICES"),
)  # fmt: skip
SETTINGS: Final[Mapping[str, Setting]] = {row.name: row for row in _ROWS}


def setting(name: str) -> Setting:
    """The setting with this canonical name, also spelled with dashes; raises SettingError with a suggestion."""
    canonical = name.lstrip("-").replace("-", "_")
    if canonical not in SETTINGS:
        import difflib

        near = difflib.get_close_matches(canonical, SETTINGS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(SETTINGS)}"
        raise SettingError(f"unknown setting: {name}", hint=hint)
    return SETTINGS[canonical]


def parse_value(name: str, text: str) -> FactValue:
    """Read the text of a flag, ``--set`` or ``--min`` as the setting's own type; raises SettingError."""
    knob = setting(name)
    try:
        if knob.type == "int":
            return _positive(name, parse_size(text).bytes if knob.name.endswith("_bytes") else int(text))
        if knob.type == "float":
            return _positive(name, float(text))
        if knob.type == "bool":
            return YES_NO[text.lower()]
    except (ValueError, KeyError):
        raise SettingError(f"{knob.name} is {knob.type}, not {text!r}") from None
    return text


def _positive(name: str, value: float) -> FactValue:
    """A number that a setting can have: finite and above zero (-1 stands for "fit it" in max_model_len)."""
    if not math.isfinite(value) or value <= 0:
        if name.replace("-", "_") == "max_model_len" and value == -1:
            return value
        raise ValueError(name)
    return value


def parse_assignment(text: str) -> tuple[str, FactValue]:
    """Read ``SETTING=VALUE``; raises SettingError."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise SettingError(f"not SETTING=VALUE: {text!r}", hint="for example max_model_len=8192")
    knob = setting(name.strip())
    return knob.name, parse_value(knob.name, value.strip())


def effect_of(name: str, old: FactValue | None, new: FactValue) -> Effect:
    """The effect of changing a setting from ``old`` to ``new``; an unknown old value counts as the dearer direction."""
    knob = SETTINGS[name]
    if knob.type == "str" or old is None or isinstance(old, str) or isinstance(new, str):
        return max(knob.raised, knob.lowered)
    return knob.raised if new > old else knob.lowered


def default_value(name: str, framework_version: str | None) -> FactValue | None:
    """The engine's default in that version; None where it depends on more than the version, or the version is unknown."""
    table = SETTINGS[name].default_in
    if framework_version is None or table is None:
        return None
    from packaging.version import InvalidVersion, Version

    from oomguard.memory.constants import constant

    try:
        version = Version(Version(framework_version).base_version)
    except InvalidVersion:
        return None
    value: FactValue = constant(table, version)["default_ratio"]
    return value


def flag_words(name: str, value: FactValue | None) -> list[str] | None:
    """The setting as words of a command line, None where it has no flag."""
    flag = SETTINGS[name].flag
    if flag is None or value is None:
        return None
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    return [flag, str(value)]


def as_flag(name: str, value: FactValue | None) -> str | None:
    """The setting as a flag to paste into a shell, None where it has none."""
    words = flag_words(name, value)
    return None if words is None else shlex.join(words)


def as_kwarg(name: str, value: FactValue | None) -> str | None:
    """The setting as a keyword argument, None where it has none."""
    kwarg = SETTINGS[name].kwarg
    return None if kwarg is None or value is None else f"{kwarg}={value!r}"


def as_env(name: str, value: FactValue | None) -> str | None:
    """The setting as an environment variable, None where it has none."""
    env = SETTINGS[name].env
    return None if env is None or value is None else f"{env}={shlex.quote(str(value))}"
