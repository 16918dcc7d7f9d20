"""Whether a measured start was of one model, by its weights and by what its cache holds, and of one engine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from oomguard.errors import SettingError
from oomguard.facts import GIB, format_gib, number_of
from oomguard.incident import EngineStart
from oomguard.memory.model.model import Model
from oomguard.memory.vllm.start import VllmSettings
from oomguard.memory.vllm.start_budget import budget_start

# Totals and what is asked of them are printed with two decimals.
_TOTAL_SLACK_BYTES: Final = 2e-2 * GIB
# By how much counting may be off; another model's weights differ by more.
_SAME_WEIGHTS_RATIO: Final = 0.1
# By how much the tokens in a printed pool may be off; its size is printed with two decimals.
_SAME_TOKENS_RATIO: Final = 0.05


def refuse_other_start(start: EngineStart, own: VllmSettings, model: Model, name: str) -> None:
    """Raise SettingError for a start of another model, with a draft, or of several engines.

    Args:
        start: the measured start.
        own: the settings that it was made with.
        model: the model, read with those.
        name: what the start is called in messages, its log's name.
    """
    if "speculative" in start.facts and start.facts["speculative"].value:
        raise SettingError(f"{name} is of a start with a draft model", hint="give the log of a start without one")
    desired = number_of(start.facts, "desired_bytes")
    asked = own.gpu_total_bytes * own.gpu_memory_utilization
    slack = start.facts["desired_bytes"].slack + _TOTAL_SLACK_BYTES if desired is not None else 0.0
    if desired is not None and own.kv_cache_memory_bytes is None and abs(desired - asked) > slack:
        raise SettingError(
            f"{name} is of several engines: {format_gib(desired)} were asked for, its settings ask for {format_gib(asked)}",
            hint="give the log of one start",
        )
    printed = number_of(start.facts, "model_weights_bytes")
    weights = budget_start(model, replace(own, device_free_bytes=None)).weights_bytes
    if printed is not None and abs(printed - weights) > _SAME_WEIGHTS_RATIO * weights:
        raise SettingError(
            f"{name} is of a model with {format_gib(printed)} of weights, this one has {format_gib(weights)}",
            hint="give the log of a start of this model",
        )
    _check_tokens(start, own, model, name)


def _check_tokens(start: EngineStart, own: VllmSettings, model: Model, name: str) -> None:
    """Raise SettingError where the printed pool would hold another number of this model's tokens: models of one size differ in it."""
    pool, tokens = (number_of(start.facts, fact) for fact in ("kv_cache_available_bytes", "kv_cache_capacity_tokens"))
    if not pool or not tokens or not model.exact or not start.settings_complete:
        return
    known = budget_start(model, replace(own, device_free_bytes=None, kv_cache_memory_bytes=round(pool)))
    slack = start.facts["kv_cache_available_bytes"].slack / pool
    if abs(tokens - known.kv_cache_tokens) > (_SAME_TOKENS_RATIO + slack) * tokens:
        raise SettingError(
            f"{name} is of a model of which {format_gib(pool)} hold {tokens:,.0f} tokens, of this one {known.kv_cache_tokens:,}",
            hint="give the log of a start of this model, with the settings it was made with",
        )
