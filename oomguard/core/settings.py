"""The registry of settings: every knob by its canonical name, its type, its fact, and what turning
it costs.

The rows stand in settings.toml; how each engine spells them stands in
engines/<engine>/settings.toml (surfaces.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from oomguard.core.errors import SettingError
from oomguard.core.facts import YES_NO, Fact, FactValue, parse_size
from oomguard.core.files import read_tables
from oomguard.core.incident import Effect, SettingInForce

SettingType = Literal["int", "float", "bool", "str"]
Unit = Literal["", "bytes", "tokens", "ratio"]

_FILE: Final = Path(__file__).with_name("settings.toml")


@dataclass(frozen=True, slots=True)
class Setting:
    """One canonical knob.

    Attributes:
        name: canonical name; its end is the unit, where the fact's does not tell it.
        type: what a value is.
        raised: effect of a larger value, or of switching a yes/no setting on; for text, of any
            change.
        lowered: effect of a smaller value, or of switching it off.
        fact: the fact that holds its value in a log, None where no log prints it.
        hard_limit: a value that the user wrote is never raised by itself.
        env: the environment variable that every engine reads, or None.
        values: effects of a change to one of these texts, where it differs.
        moot_by: the facts under which the setting does nothing.
        moot_but_in: the kinds of failure in which it counts all the same.
    """

    name: str
    type: SettingType
    raised: Effect
    lowered: Effect
    fact: str | None = None
    hard_limit: bool = False
    env: str | None = None
    values: Mapping[str, Effect] = field(default_factory=dict)
    moot_by: frozenset[str] = frozenset()
    moot_but_in: frozenset[str] = frozenset()
    free_by: frozenset[str] = frozenset()

    def is_moot(self, kind: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether changing it does nothing in a failure of this kind, by what
        else is set.
        """
        holds = any(facts[name].value is True for name in self.moot_by if name in facts)
        return holds and kind not in self.moot_but_in

    @property
    def unit(self) -> Unit:
        """The unit of its values, as the end of the fact's name or of its own tells it."""
        ends = (name.rpartition("_")[2] for name in (self.fact, self.name) if name)
        return next((unit for end in ends for unit in get_args(Unit) if unit and end == unit), "")


def _read() -> Mapping[str, Setting]:
    table: dict[str, Any] = next(iter(read_tables("settings", [_FILE]).values()))
    rows = {}
    for name, row in table.items():
        raised, lowered = (
            Effect.parse(row.get(way) or row["effect"]) for way in ("raised", "lowered")
        )
        values = {text: Effect.parse(effect) for text, effect in row.get("values", {}).items()}
        is_hard = row.get("limit") == "hard"
        moot = row.get("moot", {})
        own = Setting(
            name, row["type"], raised, lowered, row.get("fact"), is_hard, row.get("env"), values
        )
        rows[name] = replace(
            own,
            moot_by=frozenset(moot.get("by", ())),
            moot_but_in=frozenset(moot.get("but_in", ())),
            free_by=frozenset(row.get("free_by", ())),
        )
    return MappingProxyType(rows)


SETTINGS: Final[Mapping[str, Setting]] = _read()
# Setting -> the fact that carries its value in a log; which model runs is listed like a setting.
SETTING_FACTS: Final = MappingProxyType(
    {"model": "model"}
    | {name: knob.fact for name, knob in SETTINGS.items() if knob.fact is not None}
)


def setting(name: str) -> Setting:
    """Return the setting with this canonical name, also spelled with dashes.

    Raises:
        SettingError: for an unknown name, with the nearest known one.
    """
    canonical = name.lstrip("-").replace("-", "_")
    if canonical not in SETTINGS:
        import difflib

        near = difflib.get_close_matches(canonical, SETTINGS, n=1, cutoff=0.6)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"known settings: {', '.join(SETTINGS)}"
        raise SettingError(f"unknown setting: {name}", hint=hint)
    return SETTINGS[canonical]


def parse_value(name: str, text: str) -> FactValue:
    """Read the text of a flag, ``--set`` or ``--min`` as the setting's own type; sizes may carry a
    unit.

    Raises:
        SettingError: for an unknown setting, or a text that is no value of it.
    """
    knob = setting(name)
    try:
        if knob.type == "int":
            return _positive(knob, parse_size(text).bytes if knob.unit == "bytes" else int(text))
        if knob.type == "float":
            return _positive(knob, float(text))
        if knob.type == "bool":
            return YES_NO[text.lower()]
    except (ValueError, KeyError):
        raise SettingError(f"{knob.name} is {knob.type}, not {text!r}") from None
    return text


def _positive(knob: Setting, value: float) -> FactValue:
    """Return a number that a setting can have: finite and above zero (-1 stands for "fit it" in
    max_model_len).
    """
    if not math.isfinite(value) or value <= 0:
        if knob.name == "max_model_len" and value == -1:
            return value
        raise ValueError(knob.name)
    return value


def effect_of(
    name: str,
    old: FactValue | None,
    new: FactValue,
    facts: Mapping[str, Fact] = MappingProxyType({}),
) -> Effect:
    """Return the effect of changing a setting from ``old`` to ``new``; an unknown old value counts
    as the dearer way.

    ``facts``: those of the failure; where one of them says so, neither way costs anything.
    """
    knob = SETTINGS[name]
    if any(facts[fact].value is True for fact in knob.free_by if fact in facts):
        return Effect.OUTPUT_PRESERVING
    if isinstance(new, str) and new in knob.values:
        return knob.values[new]
    if knob.type == "str" or old is None or isinstance(old, str) or isinstance(new, str):
        return max(knob.raised, knob.lowered)
    if new > old:
        return knob.raised
    return knob.lowered


def value_in_force(
    name: str, in_force: Mapping[str, SettingInForce], facts: Mapping[str, Fact]
) -> tuple[FactValue, str] | None:
    """Return a setting's present value and where it comes from, None where nothing tells it.

    Args:
        name: canonical name; also one that is no setting of the registry (``model``).
        in_force: the settings as the command, its echo or an earlier patch has them; they come
            first.
        facts: the facts of the log, which may print the value under the fact's name.
    """
    own = in_force.get(name)
    if own is not None and own.value is not None:
        return own.value, own.source
    fact = facts.get(SETTING_FACTS.get(name, name))
    if fact is None:
        return None
    return (fact.value, fact.source)
