"""Determine the effective settings: the caller's, the engine's, then a script's flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from oomguard.core.facts import REGISTRY, Fact, FactValue, is_of_type, number_of
from oomguard.core.incident import SettingInForce
from oomguard.core.settings import SETTING_FACTS, SETTINGS

# vLLM lists its effective settings in the ``non-default args`` line.

# A rule's condition may ask whether the user set these settings.
_ASKED: Final = tuple(name for name in SETTINGS if f"{name}_set" in REGISTRY)
_ENTRY: Final = (
    r"'(\w+)': ('(?:[^'\\]|\\.)*'|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|True|False|None)(?=[,}])"
)
_LIMITS: Final = r"'limit_mm_per_prompt': (\{[^{}]*\})"
_BRACES: Final = r"'(?:[^'\\]|\\.)*'|[{}]"
_MAX_DIGITS: Final = 18
ECHO_ANCHOR: Final = "non-default args: {"


class Echo(NamedTuple):
    """Hold the settings of one echo.

    ``complete`` means that its end is visible, so the user set nothing else.
    """

    settings: dict[str, SettingInForce]
    complete: bool


def read_echo(text: str) -> Echo | None:
    """Parse a ``non-default args`` line, wrapped or not; None without such a line.

    It reads plain values (numbers, text, True, False, None), and limits of images and video as
    JSON. Other objects print as ``<...>`` without a value.
    """
    start = text.find(ECHO_ANCHOR)
    if start < 0:
        return None
    body = text[start + len(ECHO_ANCHOR) - 1 :]
    end = _closing_brace(body)
    entries = re.findall(_ENTRY, body[:end])
    values = {name: _literal(raw) for name, raw in entries}
    found = {}
    for name, value in values.items():
        found[name] = SettingInForce(name, _own_choice(name, value), True, "printed")
    if limits := re.search(_LIMITS, body[:end]):
        name = "limit_mm_per_prompt"
        found[name] = SettingInForce(name, limits.group(1).replace("'", '"'), True, "printed")
    return Echo(found, end is not None)


def _own_choice(name: str, value: FactValue | None) -> FactValue | None:
    """Return a value, or None for a negative number, with which the engine chooses itself."""
    if name in SETTINGS and isinstance(value, (int, float)) and value < 0:
        return None
    return value


def _closing_brace(body: str) -> int | None:
    """Return the position after the brace that closes the first one, or None.

    Quoted braces do not count.
    """
    depth = 0
    for match in re.finditer(_BRACES, body):
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
        # No setting has so many digits, and some do not fit in a double.
        return None
    if re.search(r"[.e]", raw):
        return float(raw)
    return int(raw)


def setting_facts(settings: Mapping[str, SettingInForce], *, complete: bool) -> dict[str, Fact]:
    """Return the facts of settings.

    With ``complete`` the list has everything that the user set, so the facts also include unset
    ones.
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


# The source of a flag of a program that is not the engine; the program may ignore it.
SCRIPT: Final = "script"
# The source of all arguments that a program gave its engine, reported from inside the engine.
ARGUMENTS: Final = "arguments"
# The start of the source text for settings from the engine's own configuration file.
CONFIG_FILE: Final = "config file"
_COMPLETE: Final = ("command", ARGUMENTS, CONFIG_FILE)
SHARE: Final = "gpu_memory_utilization"
# A host's total changes between the printed line and the start. A share that a script ignores
# differs by more.
AGREES_RATIO: Final = 0.05
_DIGITS: Final = 6


def merged_settings(
    echoed: Mapping[str, SettingInForce],
    given: Mapping[str, SettingInForce],
    *,
    echo_complete: bool,
) -> tuple[dict[str, SettingInForce], bool]:
    """Return the effective settings, and whether they are all that the user set.

    The engine's own command line is as complete as its echo. If either is complete, a script's flag
    that it does not list was ignored.

    Args:
        echoed: the engine's list of settings.
        given: the caller's settings; they take precedence, except for a script's flags.
        echo_complete: whether the end of the engine's list is visible.
    """
    stated = {}
    for name, setting in given.items():
        if setting.source != SCRIPT:
            stated[name] = setting
    settings = {**echoed, **stated}
    complete = echo_complete
    for setting in settings.values():
        complete = complete or setting.source.startswith(_COMPLETE)
    if not complete:
        # The engine may have received a script's flag; without a complete list nothing excludes it.
        flags = {}
        for name, flag in given.items():
            if flag.source == SCRIPT:
                flags[name] = flag
        settings = {**flags, **settings}
    return settings, complete


def without_contradicted(
    settings: Mapping[str, SettingInForce], printed: Mapping[str, Fact], *, complete: bool
) -> tuple[dict[str, SettingInForce], dict[str, Fact]]:
    """Drop the script's flags that ``printed`` contradicts; return the others' facts too.

    ``complete`` means that ``settings`` has everything that the user set.
    """
    kept = {}
    for name, setting in settings.items():
        if setting.source != SCRIPT or _agrees(setting, printed):
            kept[name] = setting
    return kept, setting_facts(kept, complete=complete)


def requested_share(facts: Mapping[str, Fact]) -> Fact | None:
    """Return requested ÷ total as the utilization, 0 to 1; None if one is unknown.

    Both are rounded, so the shortest number within their rounding is the most likely one.
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
    shortest = middle
    for n in range(1, _DIGITS + 1):
        if least <= (v := round(middle, n)) <= most:
            shortest = v
            break
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
    """Add the utilization from requested ÷ total unless the facts already have it."""
    if SETTING_FACTS[SHARE] in facts:
        share = None
    else:
        share = requested_share(facts)
    if share is None:
        return dict(facts)
    return {**facts, share.name: share}
