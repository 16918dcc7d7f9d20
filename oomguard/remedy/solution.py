"""Represent a solved value, or the reason why there is none, and the models that solve them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from oomguard.core.facts import REGISTRY, FactValue
from oomguard.core.incident import Alternative, Effect, Incident, Patch
from oomguard.core.settings import SETTING_FACTS
from oomguard.remedy.policy import Policy

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
    sentences = []
    for entry in entries:
        if entry != _OUTSIDE:
            sentences.append(as_sentence(entry))
    return tuple(dict.fromkeys(sentences))


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


# The model behind a failure: it solves values that no printed number gives.


# Names after ``solve`` in rule files for values that only the model behind a failure has.
MODELLED: Final = frozenset({"rows_that_fit", "sequences_for_warmup", "step_tokens_for_tried"})


class FailureModel(Protocol):
    """What failed, as far as it can be computed: which values of its settings fit."""

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the value of a setting with which it fits; None if it cannot be solved."""

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return one group of patches that is enough together; empty if nothing helps."""

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what helps if no setting does, such as a larger device or more devices."""


@dataclass(frozen=True, slots=True)
class ModelChain:
    """Several models behind one failure; the first with an answer counts."""

    models: tuple[FailureModel, ...]

    def solve(self, setting: str, incident: Incident) -> Solution | None:
        """Return the first solved value of a setting, or the first reason for none."""
        first = None
        for model in self.models:
            solution = model.solve(setting, incident)
            if solution is not None and solution.value is not None:
                return solution
            # Without any value, the first model's reason is the closest to the failure.
            first = first or solution
        return first

    def solve_together(self, incident: Incident, policy: Policy) -> tuple[Patch, ...]:
        """Return the first group of patches."""
        for model in self.models:
            group = model.solve_together(incident, policy)
            if group:
                return group
        return ()

    def smallest_that_fits(self, incident: Incident) -> tuple[Alternative, ...]:
        """Return what else each model would make fit."""
        others: list[Alternative] = []
        for model in self.models:
            others += model.smallest_that_fits(incident)
        return tuple(others)
