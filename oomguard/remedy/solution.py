"""Represent a solved value, or the reason why there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from oomguard.core.facts import REGISTRY, FactValue
from oomguard.core.incident import Effect
from oomguard.core.settings import SETTING_FACTS

# Words for unknown facts: a message never shows a fact's name.
_ENTRY: Final = re.compile(r"(?P<what>.+): not (?:printed|known|measured)(?P<more> \(.*\))?")
_IN_WORDS: Final = {
    "attention implementation": "which attention implementation is in use",
    "available KV cache memory": "how much memory is left for the KV cache",
    "batch_size": "the batch size",
    "baseline_bytes": "how much memory was in use before the call",
    "device free": "how much of the device is free",
    "device total": "how large the device is",
    "device_total_bytes": "how large the device is",
    "free memory": "how much of the device is free",
    "KV need": "how much KV cache one request needs",
    "memory of one graph": "how much memory one CUDA graph takes",
    "number of devices": "how many devices there are",
    "other devices": "whether another device has room",
    "peak activation": "how much memory the activations of a step take",
    "prompt length": "how long the prompts are",
    "row_bytes": "how much memory one row takes",
    "tried": "how much memory was asked for",
    "vocabulary size": "the size of the vocabulary",
    "weights": "the size of the weights",
}
# No log shows this, so naming it would say nothing about the failure.
_OUTSIDE: Final = "a quantised checkpoint of this model: not known"
_AS_IT_IS: Final = ("the ", "what ", "how ", "who ", "whether ", "which ", "a ", "an ")
_SETTINGS: Final = {fact: name for name, fact in SETTING_FACTS.items()}


def in_words(name: str) -> str:
    """Return a missing fact as the end of a sentence, such as ``the batch size``."""
    if name in _IN_WORDS:
        return _IN_WORDS[name]
    setting = _SETTINGS.get(name, name)
    if setting in SETTING_FACTS:
        return f"the value of {setting}"
    if name.endswith("_set"):
        return f"whether you set {name.removesuffix('_set')}"
    spec = REGISTRY.get(name)
    if spec is not None:
        if spec.type == "bool":
            name = f"whether {spec.meaning}"
        else:
            name = spec.meaning
    if name.startswith(_AS_IT_IS):
        return name
    return f"the {name}"


def not_shown(names: Iterable[str]) -> str:
    """Return one sentence that names all missing facts."""
    *some, last = dict.fromkeys(in_words(name) for name in names)
    return f"The log does not show {', '.join(some) + ' and ' if some else ''}{last}."


def as_sentence(entry: str) -> str:
    """Return an entry like ``device total: not printed`` as a sentence, else unchanged."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        return entry
    what = found.group("what")
    more = found.group("more") or ""
    return f"{not_shown([what]).removesuffix('.')}{more}."


def as_sentences(entries: Iterable[str]) -> tuple[str, ...]:
    """Return the entries as distinct sentences, without those that no log can show."""
    return tuple(dict.fromkeys(as_sentence(entry) for entry in entries if entry != _OUTSIDE))


@dataclass(frozen=True, slots=True)
class Solution:
    """A value that should fit, or None with a reason that names what is missing.

    Attributes:
        value: the value; None if there is none.
        reason: why this value, or why none.
        freed_bytes: the bytes that the change frees; None: unknown.
        unknown: the missing facts.
        predicts: facts that the next attempt should show.
        blocked_by: why it cannot be applied with any permission; None: nothing.
        effect: its effect here; None: the setting's usual effect.
    """

    value: FactValue | None
    reason: str
    freed_bytes: int | None = None
    unknown: tuple[str, ...] = ()
    predicts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    blocked_by: str | None = None
    effect: Effect | None = None
