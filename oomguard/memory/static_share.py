"""Facts of a share that counts weights and KV pool together, which is filled once the weights are in (SGLang's ``mem_fraction_static``).

The pool gets free_after_load - free_before_load * (1 - share): sglang/srt/model_executor/model_runner.py profile_max_num_token, 0.2 to
0.5.10, and mem_cache/kv_cache_configurator.py _profile_available_bytes, 0.5.23.
"""

from __future__ import annotations

from typing import Final

from oomguard.facts import Fact, number_of

_ENGINE: Final = "sglang"
_OF_A_PROMPT: Final = ("prefill", "prompt_logprobs")
# Figures that are printed once the pool stands.
_OF_A_POOL: Final = ("kv_cache_available_bytes", "pool_free_bytes", "kv_cache_capacity_tokens")
# While a model is built torch holds nothing that no tensor uses; a step gives its activations back and leaves pieces.
_BUILT_UNUSED_RATIO: Final = 0.002
_BUILT_OWN_RATIO: Final = 0.9
# The table of requests: 4 bytes for each token of context, and a few more than were asked for, of each request that may run; so many
# may where none are set (model_runner.py init_memory_pool, 0.3 to 0.5.10; mem_cache/kv_cache_configurator.py, 0.5.23).
_ENTRY_BYTES: Final = 4
_DEFAULT_REQUESTS: Final = (2048, 4096)
_LEAST_TABLE_BYTES: Final = 4 << 30
_CONTEXT_MULTIPLE: Final = 65536
_MORE_TOKENS: Final = 16


def with_static_share(facts: dict[str, Fact], phase: str) -> str:
    """Add what the weights take of the memory that was free before them, and return what the engine was doing.

    Args:
        facts: what is known; those that follow are added.
        phase: what the engine was doing, as its lines tell; where they do not, weights that can be all that was allocated tell it.
    """
    _add_least_share(facts)
    if facts["framework"].value != _ENGINE:
        return phase
    _add_request_table(facts, phase)
    has_pool = "later_weights_frames" in facts or any(number_of(facts, name) is not None for name in _OF_A_POOL)
    if phase == "unknown" and not has_pool and _builds_model(facts):
        phase = "load_weights"
    is_prompt = phase in _OF_A_PROMPT and "multimodal_frames" not in facts
    facts["prompt_step"] = Fact("prompt_step", is_prompt, "solved")
    if has_pool:
        facts["pool_stands"] = Fact("pool_stands", True, "solved")
    elif phase == "load_weights":
        facts["before_kv_cache"] = Fact("before_kv_cache", True, "solved")
    return phase


def _add_least_share(facts: dict[str, Fact]) -> None:
    names = ("initial_free_bytes", "model_weights_bytes", "loaded_free_bytes")
    before, weights, after = (number_of(facts, name) for name in names)
    if weights is not None and before is None and after is not None:
        before = after + weights
        facts["initial_free_bytes"] = Fact("initial_free_bytes", round(before), "solved")
    elif weights is not None and before is not None and after is None:
        after = before - weights
    counts_both = "mem_fraction_static_ratio" in facts or facts["framework"].value == _ENGINE
    if counts_both and before and after is not None:
        facts["static_share_least_ratio"] = Fact("static_share_least_ratio", max(0.0, 1 - after / before), "solved")
    least, now = (number_of(facts, name) for name in ("static_share_least_ratio", "mem_fraction_static_ratio"))
    if least is not None:
        holds = now is not None and now > least
        facts["static_share_holds_weights"] = Fact("static_share_holds_weights", holds, "solved")


def _add_request_table(facts: dict[str, Fact], phase: str) -> None:
    """Name the table of requests where just its bytes were asked for, and the context that the model has where none is set.

    Where no context is known, only a number of rows that is no power of two tells: any round size is a multiple of the others.
    """
    tried, requests = number_of(facts, "tried_bytes"), number_of(facts, "max_num_seqs")
    if tried is None or tried < _LEAST_TABLE_BYTES or "buffer" in facts or phase not in {"kv_cache_init", "unknown"}:
        return
    context = number_of(facts, "max_model_len_tokens")
    for most in (requests,) if requests else _DEFAULT_REQUESTS:
        for rows in (most + 1,) if context is None else (most + 1, most):
            low, high = ((tried + side * facts["tried_bytes"].slack) / _ENTRY_BYTES / rows for side in (-1, 1))
            if context is None and high - low > _CONTEXT_MULTIPLE / 16:
                continue  # so wide a range holds some length or other
            tokens = context or int(high) // _CONTEXT_MULTIPLE * _CONTEXT_MULTIPLE
            if tokens >= _CONTEXT_MULTIPLE and low - _MORE_TOKENS <= tokens <= high:
                facts["buffer"] = Fact("buffer", "request table", "solved")
                facts.setdefault("max_model_len_tokens", Fact("max_model_len_tokens", int(tokens), "solved"))
                return


def _builds_model(facts: dict[str, Fact]) -> bool:
    """Return whether all that the process holds is a model that is being built: its frames say so, or its size and the figures."""
    if "device_context_frames" in facts:
        return True
    names = ("estimated_weights_bytes", "device_total_bytes", "own_ratio", "unused_ratio")
    weights, total, own, unused = (number_of(facts, name) for name in names)
    too_large = weights is not None and total is not None and weights > total
    return (
        too_large and own is not None and own > _BUILT_OWN_RATIO and unused is not None and unused < _BUILT_UNUSED_RATIO
    )
