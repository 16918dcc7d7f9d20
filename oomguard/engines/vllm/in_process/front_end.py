"""The front end of an engine whose core was made again: what it holds of the old core becomes what the new one's own would hold."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from oomguard.incident import SettingInForce

# What a program may ask its engine for, and a new core may have otherwise.
_TOLD: Final = {
    "model_config": ("max_model_len",),
    "scheduler_config": ("max_num_batched_tokens", "max_num_seqs"),
    "cache_config": ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_gpu_blocks"),
}


# What decides how much a step takes, and is printed at no start of some engines.
_OF_A_STEP: Final = ("max_num_batched_tokens", "max_num_seqs")


def step_in_use(engine: Any) -> dict[str, SettingInForce]:
    """Return the settings of a step that an engine runs with, given or not; of none that it does not tell."""
    found = {name: getattr(getattr(engine.vllm_config, "scheduler_config", None), name, None) for name in _OF_A_STEP}
    return {
        name: SettingInForce(name, value, False, "engine") for name, value in found.items() if isinstance(value, int)
    }


def fit_front_end(engine: Any, fresh: Any) -> None:
    """Take over what follows from the new core: its limits, its counters, and that it has seen no image yet.

    Args:
        engine: the program's own engine (``LLMEngine``, ``AsyncLLM``), which has the new core now.
        fresh: the engine that the core was made with; it is dropped.
    """
    for part, names in _TOLD.items():
        for name in names:
            with contextlib.suppress(AttributeError):
                setattr(getattr(engine.vllm_config, part), name, getattr(getattr(fresh.vllm_config, part), name))
    # What was sent once is not sent again, and the new core has nothing of it.
    with contextlib.suppress(AttributeError):
        engine.renderer.clear_mm_cache()
    with contextlib.suppress(AttributeError):  # its own have been taken out of the registry by the new ones
        engine.logger_manager = fresh.logger_manager
    with contextlib.suppress(AttributeError, IndexError):
        engine._logger_ref[0] = fresh.logger_manager
