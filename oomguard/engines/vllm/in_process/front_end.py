"""The front end of an engine whose core was made again: what it holds of the old core becomes what the new one's own would hold."""

from __future__ import annotations

import contextlib
from typing import Any


def fit_front_end(engine: Any, fresh: Any) -> None:
    """Take over what follows from the new core: its limits, its counters, and that it has seen no image yet.

    Args:
        engine: the program's own engine (``LLMEngine``, ``AsyncLLM``), which has the new core now.
        fresh: the engine that the core was made with; it is dropped.
    """
    with contextlib.suppress(AttributeError):
        engine.vllm_config.model_config.max_model_len = fresh.vllm_config.model_config.max_model_len
    # What was sent once is not sent again, and the new core has nothing of it.
    with contextlib.suppress(AttributeError):
        engine.renderer.clear_mm_cache()
    with contextlib.suppress(AttributeError):  # its own have been taken out of the registry by the new ones
        engine.logger_manager = fresh.logger_manager
    with contextlib.suppress(AttributeError, IndexError):
        engine._logger_ref[0] = fresh.logger_manager
