"""Whether a request fits where no prefixes are cached: beside its own state a recurrent layer keeps those of prefixes."""

from __future__ import annotations

from dataclasses import replace

from oomguard.memory.model.model import Model
from oomguard.memory.vllm.start import VllmSettings
from oomguard.memory.vllm.start_caches import start_caches


def fits_without_prefixes(model: Model, settings: VllmSettings, blocks: int) -> bool | None:
    """Return True where ``blocks`` hold one request of the full length as soon as no prefixes are cached, else None."""
    if settings.enable_prefix_caching is False:
        return None
    needed = start_caches(model, settings).layout.request_blocks() + 1
    without = start_caches(model, replace(settings, enable_prefix_caching=False)).layout.request_blocks() + 1
    return True if without <= blocks < needed else None
