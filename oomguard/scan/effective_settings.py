"""Which value of a setting is in force, by who states it: the caller, the engine, then a script
whose flags may be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from oomguard.core.facts import REGISTRY, Fact, FactValue, is_of_type, number_of
from oomguard.core.incident import SettingInForce
from oomguard.core.settings import SETTING_FACTS, SETTINGS

# Settings in force as the engine echoes them: vLLM's ``non-default args`` line.

# The settings of which a condition may ask whether the user set them.
_ASKED: Final = tuple(name for name in SETTINGS if f"{name}_set" in REGISTRY)
_ENTRY = re.compile(
    r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False|None)(?=[,}])"
)
_LIMITS = re.compile(r"'limit_mm_per_prompt': (\{[^{}]*\})")
_BRACES = re.compile(r"'(?:[^'\\]|\\.)*'|[{}]")
_MAX_DIGITS: Final = 18
ECHO_ANCHOR: Final = "non-default args: {"


@dataclass(frozen=True, slots=True)
class Echo:
    """The settings of one echo; ``complete`` if its end was seen, so that the user set nothing
    else.
    """

    settings: dict[str, SettingInForce]
    complete: bool


def read_echo(text: str) -> Echo | None:
    """Read the settings of a ``non-default args`` line, also a wrapped one; None if the text holds
    no such line.

    Only plain values are read (numbers, text, True, False, None), and the limits of images and
    video as JSON; other objects print as ``<...>`` and tell nothing.
    """
    start = text.find(ECHO_ANCHOR)
    if start < 0:
        return None
    body = text[start + len(ECHO_ANCHOR) - 1 :]
    end = _closing_brace(body)
    entries = _ENTRY.findall(body[:end] if end else body)
    values = {name: _literal(raw) for name, raw in entries}
    found = {
        name: SettingInForce(name, _own_choice(name, value), True, "printed")
        for name, value in values.items()
    }
    if limits := _LIMITS.search(body[:end] if end else body):
        name = "limit_mm_per_prompt"
        found[name] = SettingInForce(name, limits.group(1).replace("'", '"'), True, "printed")
    return Echo(found, end is not None)


def _own_choice(name: str, value: FactValue | None) -> FactValue | None:
    """Return a value, None for one below zero of a known number: by it the engine is told to find
    the value itself.
    """
    if name in SETTINGS and isinstance(value, (int, float)) and value < 0:
        return None
    return value


def _closing_brace(body: str) -> int | None:
    """Return the position behind the brace that closes the first one, None if it stays open; quoted
    braces do not count.
    """
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
    if re.search(r"[.e]", raw):
        return float(raw)
    return int(raw)


def setting_facts(settings: Mapping[str, SettingInForce], *, complete: bool) -> dict[str, Fact]:
    """Return the facts that settings carry; with ``complete`` (all that the user set is listed)
    also what was not set.
    """
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


# The source of a flag on the command line of a program that is not the engine's own: the program
# may ignore it.
SCRIPT: Final = "script"
# The source of all that a program gave its engine, as what runs inside the engine told it.
ARGUMENTS: Final = "arguments"
# How the source of a setting begins that the engine's own file gives; the file is read beside the
# command.
CONFIG_FILE: Final = "config file"
_COMPLETE: Final = ("command", ARGUMENTS, CONFIG_FILE)
SHARE: Final = "gpu_memory_utilization"
# A host's total moves between the line that prints it and the start; a share that a script ignores
# is further off.
AGREES_RATIO: Final = 0.05
_DIGITS: Final = 6


def merged_settings(
    echoed: Mapping[str, SettingInForce],
    given: Mapping[str, SettingInForce],
    *,
    echo_complete: bool,
) -> tuple[dict[str, SettingInForce], bool]:
    """Return the settings in force, and whether they are all that the user set.

    The engine's own command line lists as much as its echo does. If either is complete, a script's
    flag that it does not list was ignored.

    Args:
        echoed: the settings as the engine lists them.
        given: the settings that the caller knows; they win, except for a script's flags.
        echo_complete: whether the engine's list was seen to its end.
    """
    stated = {name: setting for name, setting in given.items() if setting.source != SCRIPT}
    settings = {**echoed, **stated}
    complete = echo_complete or any(
        setting.source.startswith(_COMPLETE) for setting in settings.values()
    )
    if not complete:
        settings = {
            **{name: flag for name, flag in given.items() if flag.source == SCRIPT},
            **settings,
        }
    return settings, complete


def without_contradicted(
    settings: Mapping[str, SettingInForce], printed: Mapping[str, Fact], *, complete: bool
) -> tuple[dict[str, SettingInForce], dict[str, Fact]]:
    """Return the settings without the script's flags that ``printed`` contradicts, and the facts of
    the rest.

    ``complete`` says that ``settings`` are all that the user set.
    """
    kept = {
        name: setting
        for name, setting in settings.items()
        if setting.source != SCRIPT or _agrees(setting, printed)
    }
    return kept, setting_facts(kept, complete=complete)


def requested_share(facts: Mapping[str, Fact]) -> Fact | None:
    """Return requested ÷ total as the utilization, 0 to 1; None if one of them is unknown.

    Both are printed rounded: the shortest number within their rounding is the one most likely
    typed.
    """
    desired = number_of(facts, "desired_bytes")
    total = number_of(facts, "device_total_bytes")
    if not desired or not total or desired < 0 or total < 0:
        return None
    around = facts["desired_bytes"].slack
    of_total = facts["device_total_bytes"].slack
    least = (desired - around) / (total + of_total)
    most = (desired + around) / max(1.0, total - of_total)
    middle = desired / total
    shortest = next(
        (v for n in range(1, _DIGITS + 1) if least <= (v := round(middle, n)) <= most), middle
    )
    return Fact(SETTING_FACTS[SHARE], shortest, "solved", (most - least) / 2)


def _agrees(flag: SettingInForce, printed: Mapping[str, Fact]) -> bool:
    """Return whether no printed value contradicts a script's flag."""
    fact = printed.get(SETTING_FACTS.get(flag.name, flag.name))
    if flag.value is None or (fact is not None and not is_of_type(fact.name, flag.value)):
        return False
    if fact is not None:
        return _same(flag.value, fact)
    if flag.name == SHARE:
        share = requested_share(printed)
    else:
        share = None
    if share is None:
        return True
    if isinstance(flag.value, (int, float)):
        apart = abs(float(flag.value) - float(share.value))
    else:
        apart = float("inf")
    return apart <= share.slack + AGREES_RATIO * float(share.value)


def _same(value: FactValue, fact: Fact) -> bool:
    if isinstance(value, str) or isinstance(fact.value, str):
        return str(value).removeprefix("torch.") == str(fact.value).removeprefix("torch.")
    return abs(value - fact.value) <= fact.slack + 1e-9


def with_requested_share(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Add the utilization that requested ÷ total tells, unless the facts hold it already."""
    if SETTING_FACTS[SHARE] in facts:
        share = None
    else:
        share = requested_share(facts)
    if share is None:
        return dict(facts)
    return {**facts, share.name: share}
