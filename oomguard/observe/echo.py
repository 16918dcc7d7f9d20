"""Settings in force as the engine echoes them: vLLM's ``non-default args`` line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.facts import REGISTRY, Fact, FactValue, is_of_type
from oomguard.incident import SettingInForce
from oomguard.settings import SETTING_FACTS, SETTINGS

# The settings of which a condition may ask whether the user set them.
_ASKED: Final = tuple(name for name in SETTINGS if f"{name}_set" in REGISTRY)
_ENTRY = re.compile(r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False|None)(?=[,}])")
_LIMITS = re.compile(r"'limit_mm_per_prompt': (\{[^{}]*\})")
_BRACES = re.compile(r"'(?:[^'\\]|\\.)*'|[{}]")
_MAX_DIGITS: Final = 18
ECHO_ANCHOR: Final = "non-default args: {"


@dataclass(frozen=True, slots=True)
class Echo:
    """The settings of one echo; ``complete`` if its end was seen, so that the user set nothing else."""

    settings: dict[str, SettingInForce]
    complete: bool


def read_echo(text: str) -> Echo | None:
    """Read the settings of a ``non-default args`` line, also a wrapped one; None if the text holds no such line.

    Only plain values are read (numbers, text, True, False, None), and the limits of images and video as JSON; other
    objects print as ``<...>`` and tell nothing.
    """
    start = text.find(ECHO_ANCHOR)
    if start < 0:
        return None
    body = text[start + len(ECHO_ANCHOR) - 1 :]
    end = _closing_brace(body)
    entries = _ENTRY.findall(body[:end] if end else body)
    values = {name: _literal(raw) for name, raw in entries}
    found = {name: SettingInForce(name, _own_choice(name, value), True, "printed") for name, value in values.items()}
    if limits := _LIMITS.search(body[:end] if end else body):
        name = "limit_mm_per_prompt"
        found[name] = SettingInForce(name, limits.group(1).replace("'", '"'), True, "printed")
    return Echo(found, end is not None)


def _own_choice(name: str, value: FactValue | None) -> FactValue | None:
    """Return a value, None for one below zero of a known number: by it the engine is told to find the value itself."""
    return None if name in SETTINGS and isinstance(value, (int, float)) and value < 0 else value


def _closing_brace(body: str) -> int | None:
    """Return the position behind the brace that closes the first one, None if it stays open; quoted braces do not count."""
    depth = 0
    for match in _BRACES.finditer(body):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
    return None


def _literal(raw: str) -> FactValue | None:
    if raw in {"True", "False"}:
        return raw == "True"
    if raw == "None":
        return None
    if raw.startswith("'"):
        return raw[1:-1]
    if len(raw) > _MAX_DIGITS:
        return None  # no setting has so many digits, and not every double holds them
    return float(raw) if re.search(r"[.e]", raw) else int(raw)


def setting_facts(settings: Mapping[str, SettingInForce], *, complete: bool) -> dict[str, Fact]:
    """Return the facts that settings carry; with ``complete`` (all that the user set is listed) also what was not set."""
    facts: dict[str, Fact] = {}
    for name, fact in SETTING_FACTS.items():
        setting = settings.get(name)
        if setting is not None and setting.value is not None and is_of_type(fact, setting.value):
            facts[fact] = Fact(fact, setting.value, setting.source)
    for name in _ASKED:
        setting = settings.get(name)
        if setting is not None and setting.set_by_user is not None:
            facts[f"{name}_set"] = Fact(f"{name}_set", setting.set_by_user, setting.source)
        elif complete:
            facts[f"{name}_set"] = Fact(f"{name}_set", False, "printed")
    return facts
