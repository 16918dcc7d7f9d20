"""Register the settings: canonical name, type, fact, and what changing each one costs.

The rows are in settings.toml. Their spelling in each engine is in engines/<engine>/settings.toml
(setting_spellings.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, get_args

from oomguard.core.errors import SettingError
from oomguard.core.facts import YES_NO, Fact, FactValue, parse_size
from oomguard.core.files import read_tables
from oomguard.core.incident import Effect, SettingInForce

SettingType = Literal["int", "float", "bool", "str"]
Unit = Literal["", "bytes", "tokens", "ratio"]

_FILE: Final = Path(__file__).with_name("settings.toml")


class Setting(NamedTuple):
    """Describe one setting.

    Attributes:
        name: canonical name; it ends with the unit if the fact's name does not.
        type: the type of its values.
        raised: effect of a larger value, or of turning a yes/no setting on; for text, of any
            change.
        lowered: effect of a smaller value, or of turning it off.
        fact: the fact with its value in a log; None if no log prints it.
        hard_limit: whether oomguard never raises a value that the user wrote.
        env: the environment variable that every engine reads; None if there is none.
        values: effects of changing to these texts, if they differ.
        moot_by: the facts under which the setting does nothing.
        moot_but_in: the kinds of failure in which it counts nevertheless.
        free_by: the facts under which a change costs nothing.
    """

    name: str
    type: SettingType
    raised: Effect
    lowered: Effect
    fact: str | None = None
    hard_limit: bool = False
    env: str | None = None
    values: Mapping[str, Effect] = MappingProxyType({})
    moot_by: frozenset[str] = frozenset()
    moot_but_in: frozenset[str] = frozenset()
    free_by: frozenset[str] = frozenset()

    def is_moot(self, kind: str, facts: Mapping[str, Fact]) -> bool:
        """Return whether changing the setting does nothing in a failure of this kind."""
        holds = any(facts[name].value is True for name in self.moot_by if name in facts)
        return holds and kind not in self.moot_but_in

    @property
    def unit(self) -> Unit:
        """The unit of its values, from the end of the fact's name or of its own."""
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
        rows[name] = own._replace(
            moot_by=frozenset(moot.get("by", ())),
            moot_but_in=frozenset(moot.get("but_in", ())),
            free_by=frozenset(row.get("free_by", ())),
        )
    return MappingProxyType(rows)


SETTINGS: Final[Mapping[str, Setting]] = _read()
# Setting -> the fact with its value in a log. The model is listed like a setting.
SETTING_FACTS: Final = MappingProxyType(
    {"model": "model"}
    | {name: knob.fact for name, knob in SETTINGS.items() if knob.fact is not None}
)


def setting(name: str) -> Setting:
    """Return the setting with this canonical name; dashes are accepted.

    Raises:
        SettingError: if the name is unknown; the hint gives the nearest known name.

        >>> setting("max-model-len").name
        'max_model_len'
    """
    canonical = name.lstrip("-").replace("-", "_")
    if canonical not in SETTINGS:
        import difflib

        near = difflib.get_close_matches(canonical, SETTINGS, n=1, cutoff=0.6)
        if near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = "settings have the engine's own names, such as max_model_len"
        raise SettingError(f"unknown setting: {name}", hint=hint)
    return SETTINGS[canonical]


_KINDS: Final = {
    "int": "a whole number above 0",
    "float": "a number above 0",
    "bool": "true or false",
}


def parse_value(name: str, text: str) -> FactValue:
    """Read a text as the setting's type; sizes may have a unit.

    Raises:
        SettingError: if the setting is unknown or cannot take the value.
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
        kind = _KINDS[knob.type]
        raise SettingError(f"{knob.name} must be {kind}, got {text!r}") from None
    return text


def _positive(knob: Setting, value: float) -> FactValue:
    """Return a number if the setting can take it: finite and above zero.

    In max_model_len, -1 means "fit it".
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
    """Return the effect of changing a setting from ``old`` to ``new``.

    Args:
        name: canonical name of the setting.
        old: the present value; None (unknown) counts as the more expensive direction.
        new: the new value.
        facts: facts of the failure; some of them make both directions free.
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
    """Return a setting's present value and its source; None if nothing shows it.

    Args:
        name: canonical name; also one outside the registry (``model``).
        in_force: settings from the command, its echo or an earlier patch, which come first.
        facts: facts of the log, which may contain the value under the fact's name.
    """
    own = in_force.get(name)
    if own is not None and own.value is not None:
        return own.value, own.source
    fact = facts.get(SETTING_FACTS.get(name, name))
    if fact is None:
        return None
    return (fact.value, fact.source)
