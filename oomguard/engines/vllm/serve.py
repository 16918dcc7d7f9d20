"""The command that serves a model with vLLM under given settings."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields

from oomguard.memory.vllm.start import VllmSettings
from oomguard.surfaces import flag_words, surfaces


def serve_command(model: str, settings: VllmSettings, named: Collection[str]) -> str:
    """Return ``vllm serve`` for a shell, with the settings in ``named`` except those at the value they have anyway."""
    return shlex.join(["vllm", "serve", model, *serve_words(settings, named)])


def serve_words(settings: VllmSettings, named: Collection[str]) -> list[str]:
    """Return the flags of the settings in ``named`` except those at the value they have anyway."""
    words: list[str] = []
    neutral = {field.name: field.default for field in fields(settings)}
    for name in surfaces("vllm"):
        value = getattr(settings, name, None)
        if name in named and value is not None and value != neutral[name]:
            words += flag_words(name, value, "vllm", str(settings.version)) or []
    return words
