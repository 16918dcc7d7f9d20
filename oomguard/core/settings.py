"""Register the settings: canonical name, type, effect of a change, and each engine's spelling.

The rows are in settings.toml. The spellings (flag, keyword, configuration key and default) are in
engines/<folder>/settings.toml; adding such a file adds the engine.
"""

from __future__ import annotations

import functools
import math
import re
import shlex
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


_ENGINES_FOLDER: Final = Path(__file__).parents[1] / "engines"
_OFF_PREFIX: Final = "no-"
_SPELLING_KEYS: Final = frozenset(
    {
        "flags",
        "kwarg",
        "config_key",
        "unit_bytes",
        "default",
        "versions",
        "spelled",
        "many",
        "aliases",
        "inside",
        "automatic",
        "variables",
    }
)
_SUFFIXED: Final = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]{1,3})")


class Surface(NamedTuple):
    """Describe how one engine spells one setting.

    Attributes:
        flags: the long flag first, then its other forms; empty if the engine has no flag.
        kwarg: the keyword argument in Python; None if there is none.
        config_key: the key in the engine's configuration file; None if there is none.
        unit_bytes: bytes in one unit of the engine's value, if ours is in bytes.
        aliases: long flags with the same meaning, which oomguard reads and never writes.
        many: whether the flag takes all words up to the next flag.
        inside: flags of objects that contain the setting, each with its key there.
        automatic: texts that let the engine find the value itself.
        variables: environment variables that override the flag, as rows of ``name``, ``unit_bytes``
            and ``where``.
        suffixes: suffixes of numbers in the engine's flags, with their factors.
        defaults: rows of ``value``, each with the ``versions`` and the ``device_size`` it applies
            to.
        versions: the engine versions with this spelling (PEP 440); None for all versions that
            ``others`` does not cover.
        others: the spelling in other versions.
    """

    flags: tuple[str, ...] = ()
    kwarg: str | None = None
    config_key: str | None = None
    unit_bytes: int = 1
    aliases: tuple[str, ...] = ()
    many: bool = False
    inside: tuple[tuple[str, str], ...] = ()
    automatic: tuple[str, ...] = ()
    variables: tuple[Mapping[str, Any], ...] = ()
    suffixes: Mapping[str, int] = MappingProxyType({})
    defaults: tuple[Mapping[str, Any], ...] = ()
    versions: str | None = None
    others: tuple[Surface, ...] = ()

    @property
    def off_flag(self) -> str | None:
        """The flag that turns a yes/no setting off; None if there is no flag."""
        if self.flags:
            return f"--{_OFF_PREFIX}{self.flags[0].removeprefix('--')}"
        return None

    def in_version(self, version: str | None) -> Surface:
        """Return the spelling of one version; empty if that version lacks the setting.

        None as the version returns the newest spelling.
        """
        other = next(
            (one for one in self.others if is_version_in(one.versions or "", version)), None
        )
        if other is not None or self.versions is None or version is None:
            return other or self
        if is_version_in(self.versions, version):
            return self
        return Surface()

    def to_engine(self, value: FactValue) -> FactValue:
        """Convert one of our values to the engine's unit."""
        if self.unit_bytes == 1 or isinstance(value, str):
            return value
        size = value / self.unit_bytes
        if size == int(size):
            return int(size)
        return size

    def from_engine(self, name: str, text: str) -> FactValue:
        """Read the text of the engine's flag in our unit.

        Raises:
            SettingError: if the text is not a value of the setting.
        """
        if self.unit_bytes == 1:
            if SETTINGS[name].type == "int":
                number = parse_suffixed(text.strip(), self.suffixes)
            else:
                number = None
            return parse_value(name, text if number is None else str(number))
        try:
            return round(float(text) * self.unit_bytes)
        except (ValueError, OverflowError):
            raise SettingError(f"{name} must be a number, got {text!r}") from None


def parse_suffixed(text: str, suffixes: Mapping[str, int]) -> int | None:
    """Read a number like ``32k`` with an engine's suffixes; None for any other text.

    >>> parse_suffixed("32k", {"k": 1000})
    32000
    """
    found = _SUFFIXED.fullmatch(text)
    if found:
        factor = suffixes.get(found.group(2))
    else:
        factor = None
    if found is None or factor is None:
        return None
    number = found.group(1)
    if "." in number:  # a factor that is a power of two allows whole numbers only
        if factor % 10 == 0:
            return int(float(number) * factor)
        return None
    return int(number) * factor


class Grammar(NamedTuple):
    """Describe an engine's command line beyond ``FLAG VALUE`` and ``FLAG=VALUE``.

    Attributes:
        abbreviations: whether a flag may be shortened to a unique prefix.
        whole: flags that are not an abbreviation of a flag in the engine's file.
        dotted: whether ``FLAG.KEY VALUE`` sets one key of an object.
        suffixes: suffixes of numbers, with their factors.
    """

    abbreviations: bool = False
    whole: tuple[str, ...] = ()
    dotted: bool = False
    suffixes: Mapping[str, int] = MappingProxyType({})


@functools.cache
def grammar(engine: str) -> Grammar:
    """Return the grammar of an engine's command line; the plain one if its file has none."""
    row = _tables().get(engine, {}).get("grammar", {})
    return Grammar(
        row.get("abbreviations", False),
        tuple(row.get("whole", ())),
        row.get("dotted", False),
        row.get("suffixes", {}),
    )


@functools.cache
def _tables() -> Mapping[str, dict[str, Any]]:
    """Return each engine's data file by the engine's name.

    vLLM comes first, because oomguard spells settings of an unknown engine as vLLM does.
    """
    files = sorted(
        _ENGINES_FOLDER.glob("*/settings.toml"),
        key=lambda path: (path.parent.name != "vllm", path.parent.name),
    )
    return {table["engine"]: table for table in read_tables("surfaces", files).values()}


def table_of(engine: str, name: str) -> Mapping[str, Any]:
    """Return a table of an engine's data file that is not a setting; empty if absent."""
    table: Mapping[str, Any] = _tables().get(engine, {}).get(name, {})
    return table


@functools.cache
def unmanaged_arguments() -> frozenset[str]:
    """Return the names of engine arguments that oomguard never changes."""
    files = sorted(_ENGINES_FOLDER.glob("*/arguments.toml"))
    return frozenset(
        name for table in read_tables("arguments", files).values() for name in table["left_alone"]
    )


def engines() -> tuple[str, ...]:
    """Return the names of the engines that have a data file."""
    return tuple(_tables())


@functools.cache
def surfaces(engine: str) -> Mapping[str, Surface]:
    """Return an engine's spellings by setting, in the order of its file; empty without a file."""
    found = {}
    for name, row in _tables().get(engine, {}).get("settings", {}).items():
        if name not in SETTINGS:
            raise SettingError(f"engines/{engine}: unknown setting {name}")
        if "as_in" in row:
            found[name] = surfaces(row["as_in"])[name]
            continue
        found[name] = _read_spellings(
            {"suffixes": grammar(engine).suffixes, **row}, f"engines/{engine}: {name}"
        )
    return MappingProxyType(found)


def _read_spellings(row: Mapping[str, Any], where: str) -> Surface:
    """Convert a row of a data file to a spelling.

    Raises:
        SettingError: if the row has an unknown key.
    """
    if unknown := set(row) - _SPELLING_KEYS - {"suffixes"}:
        raise SettingError(
            f"{where}: unknown key {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(sorted(_SPELLING_KEYS))}",
        )
    kept = {key: row[key] for key in ("unit_bytes", "many", "automatic", "suffixes") if key in row}
    return Surface(
        tuple(row.get("flags", ())),
        row.get("kwarg"),
        row.get("config_key"),
        row.get("unit_bytes", 1),
        tuple(row.get("aliases", ())),
        row.get("many", False),
        tuple((flag, key) for flag, key in row.get("inside", ())),
        tuple(row.get("automatic", ())),
        tuple(row.get("variables", ())),
        row["suffixes"],
        tuple(row.get("default", ())),
        row.get("versions"),
        tuple(_read_spellings({**kept, **other}, where) for other in row.get("spelled", ())),
    )


def surface(name: str, engine: str, version: str | None = None) -> Surface:
    """Return how a version of an engine spells a setting.

    An engine without a data file uses the first engine that has the setting. An engine whose file
    lacks the setting has no spelling for it.
    """
    if engine in _tables():
        return surfaces(engine).get(name, Surface()).in_version(version)
    return next(
        (surfaces(known)[name] for known in engines() if name in surfaces(known)), Surface()
    )


def is_foreign(name: str, engine: str) -> bool:
    """Return whether an engine with known settings lacks this one.

    A variable that every engine reads is never foreign.
    """
    return engine in _tables() and name not in surfaces(engine) and SETTINGS[name].env is None


def default_value(
    name: str, engine: str, version: str | None, *, device_size: str | None = None
) -> FactValue | None:
    """Return the engine's default in a version; None if the file does not decide it.

    Args:
        name: canonical name of the setting.
        engine: the engine's name; an engine without a data file has no defaults.
        version: the engine's version, as printed; None if unknown.
        device_size: ``small``, ``large``, ``huge`` or ``cpu``, for defaults that depend on it.
    """
    if name in surfaces(engine):
        rows = surfaces(engine)[name].defaults
    else:
        rows = ()
    for row in rows:
        if "device_size" in row and row["device_size"] != device_size:
            continue
        if "versions" in row and not is_version_in(row["versions"], version):
            continue
        value: FactValue = row["value"]
        return value
    return None


def is_version_in(versions: str, version: str | None) -> bool:
    """Return whether a version is known and in a range such as ``>=0.8,<0.20`` (PEP 440)."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and SpecifierSet(versions).contains(
            Version(version).base_version, prereleases=True
        )
    except InvalidVersion:
        return False


def device_size(engine: str, total_bytes: int, name: str | None, version: str | None = None) -> str:
    """Classify a device as an engine version's defaults do: ``small``, ``large`` or ``huge``.

    Args:
        engine: the engine's name.
        total_bytes: the device's memory, in bytes.
        name: the device's name; None if unknown.
        version: the engine's version; None for the newest.
    """
    known = _tables()[engine]["device_size"]
    by_name = version is None or is_version_in(known["small_versions"], version)
    if by_name and name is not None and any(word in name.lower() for word in known["small_names"]):
        return "small"
    if total_bytes >= known["huge_bytes"]:
        return "huge"
    if total_bytes >= known["large_bytes"]:
        return "large"
    return "small"


def flag_words(
    name: str, value: FactValue | None, engine: str, version: str | None = None
) -> list[str] | None:
    """Return the setting as words of a command line; None without a flag or a value.

    >>> flag_words("max_model_len", 8192, "vllm")[-1]
    '8192'
    """
    spelling = surface(name, engine, version)
    if spelling.off_flag is None or value is None:
        return None
    if isinstance(value, bool):
        return [spelling.flags[0] if value else spelling.off_flag]
    return [spelling.flags[0], _text(spelling.to_engine(value))]


def _text(value: FactValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def as_flag(
    name: str, value: FactValue | None, engine: str, version: str | None = None
) -> str | None:
    """Return the setting as a flag to paste into a shell; None if the engine has no flag."""
    words = flag_words(name, value, engine, version)
    if words is None:
        return None
    return shlex.join(words)


def as_kwarg(
    name: str, value: FactValue | None, engine: str, version: str | None = None
) -> str | None:
    """Return the setting as a keyword argument; None if the engine has none."""
    spelling = surface(name, engine, version)
    if spelling.kwarg is None or value is None:
        return None
    return f"{spelling.kwarg}={spelling.to_engine(value)!r}"


def as_env(name: str, value: FactValue | None, variable: str | None = None) -> str | None:
    """Return the setting as an environment variable; None if no variable sets it.

    Args:
        name: canonical name of the setting.
        value: its value; None returns None.
        variable: the variable to use if the setting has several; None for the setting's own.
    """
    env = variable or SETTINGS[name].env
    if env is None or value is None:
        return None
    return f"{env}={shlex.quote(str(value))}"


def parse_assignment(text: str) -> tuple[str, FactValue]:
    """Read ``SETTING=VALUE`` as a user writes it for ``--min`` and ``--set``.

    Raises:
        SettingError: if the text has another form.

        >>> parse_assignment("max_model_len=8k")
        ('max_model_len', 8000)
    """
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise SettingError(f"{text!r} is not SETTING=VALUE", hint="for example: max_model_len=8192")
    knob = setting(name.strip())
    return knob.name, _value(knob.name, value.strip())


def _value(name: str, text: str) -> FactValue:
    """Read ``8k`` as 8000 and ``8K`` as 8192, as vLLM does, if the value is in our unit."""
    number = None
    if SETTINGS[name].type == "int" and surface(name, "").unit_bytes == 1:
        number = parse_suffixed(text, grammar(engines()[0]).suffixes)
    return parse_value(name, text if number is None else str(number))
