"""The command that serves a model with vLLM under given settings."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import fields

from oomguard.facts import FactValue
from oomguard.memory.vllm.start import VllmSettings
from oomguard.surfaces import flag_words, surfaces


def serve_command(model: str, settings: VllmSettings, named: Collection[str], kept_words: Sequence[str] = ()) -> str:
    """Return ``vllm serve`` for a shell.

    Args:
        model: the model.
        settings: vLLM's settings.
        named: which of them are written, except those at the value they have anyway.
        kept_words: flags that are no setting here, as they were typed.
    """
    return shlex.join(["vllm", "serve", model, *serve_words(settings, named), *kept_words])


def serve_words(settings: VllmSettings, named: Collection[str]) -> list[str]:
    """Return the flags of the settings in ``named`` except those at the value they have anyway."""
    words: list[str] = []
    neutral = {field.name: field.default for field in fields(settings)}
    for name in surfaces("vllm"):
        value = getattr(settings, name, None)
        if name in named and value is not None and value != neutral[name]:
            words += _words(name, value, str(settings.version))
    return words


def _words(name: str, value: FactValue, version: str) -> list[str]:
    """Return a setting's flag, with its values as a word each where it takes several; in versions without it the object that holds it."""
    own = surfaces("vllm")[name]
    said = flag_words(name, value, "vllm", version)
    if not own.many and not own.inside:
        return said or []
    values = [int(word) for word in re.findall(r"\d+", str(value))]
    if said is not None:
        return [said[0], *map(str, values)]
    flag, key = own.inside[0]
    return [flag, json.dumps({key: values})] if own.many else []
