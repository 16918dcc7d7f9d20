"""A setting's surfaces: the flag, keyword argument, config key and default of each engine, from the
engine's own data file.

An engine is known by its file, engines/<folder>/settings.toml: nothing else has to name it here.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_tables
from oomguard.core.settings import SETTINGS, parse_value, setting

_FOLDER: Final = Path(__file__).parents[1] / "engines"
_OFF: Final = "no-"
_KEYS: Final = frozenset(
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


@dataclass(frozen=True, slots=True)
class Surface:
    """How one engine spells one setting.

    Attributes:
        flags: the long flag first, then its other forms; empty where the engine has none.
        kwarg: the keyword argument in Python.
        config_key: the key in the engine's configuration file.
        unit_bytes: bytes in one unit of the engine's value, where ours is in bytes.
        aliases: long flags that mean the same; they are read and never written.
        many: whether the flag takes all words up to the next flag.
        inside: flags of objects that hold it too, each with the key that it has there.
        automatic: texts by which the engine is told to find the value itself.
        variables: variables of the environment that set it over the flag, each a row of ``name``,
            ``unit_bytes`` and ``where``.
        suffixes: what a number may end with in the engine's flags, and the factor.
        defaults: rows of ``value``, each with the ``versions`` and the ``device_size`` for which it
            holds.
        versions: the engine's versions that spell it so (PEP 440), None for all that ``others``
            leave; the rest has none of it.
        others: how it is spelled in other versions.
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
    suffixes: Mapping[str, int] = field(default_factory=dict)
    defaults: tuple[Mapping[str, Any], ...] = ()
    versions: str | None = None
    others: tuple[Surface, ...] = ()

    @property
    def off_flag(self) -> str | None:
        """The flag that switches a yes/no setting off, None where there is no flag."""
        if self.flags:
            return f"--{_OFF}{self.flags[0].removeprefix('--')}"
        return None

    def in_version(self, version: str | None) -> Surface:
        """Return how a version spells the setting, empty where it has none; the newest spelling
        where the version is not known.
        """
        other = next((own for own in self.others if _holds(own.versions or "", version)), None)
        if other is not None or self.versions is None or version is None:
            return other or self
        if _holds(self.versions, version):
            return self
        return Surface()

    def own(self, value: FactValue) -> FactValue:
        """Return one of our values in the engine's unit."""
        if self.unit_bytes == 1 or isinstance(value, str):
            return value
        size = value / self.unit_bytes
        if size == int(size):
            return int(size)
        return size

    def ours(self, name: str, text: str) -> FactValue:
        """Read the text of the engine's flag in our unit; raise SettingError where it is not a
        value.
        """
        if self.unit_bytes == 1:
            if SETTINGS[name].type == "int":
                number = suffixed(text.strip(), self.suffixes)
            else:
                number = None
            return parse_value(name, text if number is None else str(number))
        try:
            return round(float(text) * self.unit_bytes)
        except (ValueError, OverflowError):
            raise SettingError(f"{name} is a number, not {text!r}") from None


def suffixed(text: str, suffixes: Mapping[str, int]) -> int | None:
    """Return a number like ``32k`` by an engine's suffixes, None for any other text."""
    found = _SUFFIXED.fullmatch(text)
    if found:
        factor = suffixes.get(found.group(2))
    else:
        factor = None
    if found is None or factor is None:
        return None
    number = found.group(1)
    if "." in number:  # a factor of two takes whole numbers only
        if factor % 10 == 0:
            return int(float(number) * factor)
        return None
    return int(number) * factor


@dataclass(frozen=True, slots=True)
class Grammar:
    """How an engine's command line is written beyond ``FLAG VALUE`` and ``FLAG=VALUE``.

    Attributes:
        abbreviations: a flag may be cut as long as only one begins so.
        whole: flags that are no abbreviation of one that stands in the engine's file.
        dotted: ``FLAG.KEY VALUE`` gives one key of an object.
        suffixes: what a number may end with, and the factor.
    """

    abbreviations: bool = False
    whole: tuple[str, ...] = ()
    dotted: bool = False
    suffixes: Mapping[str, int] = field(default_factory=dict)


@functools.cache
def grammar(engine: str) -> Grammar:
    """Return how an engine's command line is written; the plain one for an engine whose file says
    nothing of it.
    """
    row = _tables().get(engine, {}).get("grammar", {})
    return Grammar(
        row.get("abbreviations", False),
        tuple(row.get("whole", ())),
        row.get("dotted", False),
        row.get("suffixes", {}),
    )


@functools.cache
def _tables() -> Mapping[str, dict[str, Any]]:
    """Return each engine's data file by the engine's name; vLLM's first, since an unknown engine is
    spelled as vLLM.
    """
    files = sorted(
        _FOLDER.glob("*/settings.toml"),
        key=lambda path: (path.parent.name != "vllm", path.parent.name),
    )
    return {table["engine"]: table for table in read_tables("surfaces", files).values()}


def table_of(engine: str, name: str) -> Mapping[str, Any]:
    """Return a table of an engine's data file that is not a setting; empty where the
    file lacks it.
    """
    table: Mapping[str, Any] = _tables().get(engine, {}).get(name, {})
    return table


@functools.cache
def left_alone() -> frozenset[str]:
    """Return the arguments of engines that nothing here changes, by the names that their data files
    give them.
    """
    files = sorted(_FOLDER.glob("*/arguments.toml"))
    return frozenset(
        name for table in read_tables("arguments", files).values() for name in table["left_alone"]
    )


def engines() -> tuple[str, ...]:
    """Return the names of the engines that have a data file."""
    return tuple(_tables())


@functools.cache
def surfaces(engine: str) -> Mapping[str, Surface]:
    """Return an engine's surfaces by setting, in the order of its file; empty for an engine without
    one.
    """
    found = {}
    for name, row in _tables().get(engine, {}).get("settings", {}).items():
        if name not in SETTINGS:
            raise SettingError(f"engines/{engine}: unknown setting {name}")
        if "as_in" in row:
            found[name] = surfaces(row["as_in"])[name]
            continue
        found[name] = _read(
            {"suffixes": grammar(engine).suffixes, **row}, f"engines/{engine}: {name}"
        )
    return MappingProxyType(found)


def _read(row: Mapping[str, Any], where: str) -> Surface:
    """Return a row of a data file as a surface; raise SettingError for a key that nothing reads."""
    if unknown := set(row) - _KEYS - {"suffixes"}:
        raise SettingError(
            f"{where}: unknown key {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(sorted(_KEYS))}",
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
        tuple(_read({**kept, **other}, where) for other in row.get("spelled", ())),
    )


def surface(name: str, engine: str, version: str | None = None) -> Surface:
    """Return how a version of an engine spells a setting.

    For an engine without a data file the first engine that has the setting counts; an engine that
    has a file and lacks the setting has no surface for it.
    """
    if engine in _tables():
        return surfaces(engine).get(name, Surface()).in_version(version)
    return next(
        (surfaces(known)[name] for known in engines() if name in surfaces(known)), Surface()
    )


def is_foreign(name: str, engine: str) -> bool:
    """Return whether an engine whose settings are known lacks this one; a variable that every
    engine reads is never foreign.
    """
    return engine in _tables() and name not in surfaces(engine) and SETTINGS[name].env is None


def default_value(
    name: str, engine: str, version: str | None, *, device_size: str | None = None
) -> FactValue | None:
    """Return the engine's default in a version, None where the file has none or it depends on what
    is not given.

    Args:
        name: canonical name of the setting.
        engine: the engine's name; an engine without a data file has no defaults.
        version: the engine's version, as printed.
        device_size: ``small``, ``large``, ``huge`` or ``cpu``, for defaults that depend on it.
    """
    if name in surfaces(engine):
        rows = surfaces(engine)[name].defaults
    else:
        rows = ()
    for row in rows:
        if "device_size" in row and row["device_size"] != device_size:
            continue
        if "versions" in row and not _holds(row["versions"], version):
            continue
        value: FactValue = row["value"]
        return value
    return None


def _holds(versions: str, version: str | None) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and SpecifierSet(versions).contains(
            Version(version).base_version, prereleases=True
        )
    except InvalidVersion:
        return False


def device_size(engine: str, total_bytes: int, name: str | None, version: str | None = None) -> str:
    """Return how a version's defaults class a device: ``small``, ``large`` or ``huge``, by its
    bytes and its name.
    """
    known = _tables()[engine]["device_size"]
    by_name = version is None or _holds(known["small_versions"], version)
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
    """Return the setting as words of a command line, None where the engine has no flag for it or no
    value is known.
    """
    own = surface(name, engine, version)
    if own.off_flag is None or value is None:
        return None
    if isinstance(value, bool):
        return [own.flags[0] if value else own.off_flag]
    return [own.flags[0], _text(own.own(value))]


def _text(value: FactValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def as_flag(
    name: str, value: FactValue | None, engine: str, version: str | None = None
) -> str | None:
    """Return the setting as a flag to paste into a shell, None where the engine has none."""
    words = flag_words(name, value, engine, version)
    if words is None:
        return None
    return shlex.join(words)


def as_kwarg(
    name: str, value: FactValue | None, engine: str, version: str | None = None
) -> str | None:
    """Return the setting as a keyword argument, None where the engine has none."""
    own = surface(name, engine, version)
    if own.kwarg is None or value is None:
        return None
    return f"{own.kwarg}={own.own(value)!r}"


def as_env(name: str, value: FactValue | None, variable: str | None = None) -> str | None:
    """Return the setting as an environment variable, None if no variable sets it; ``variable`` is
    the name to use if it has several.
    """
    env = variable or SETTINGS[name].env
    if env is None or value is None:
        return None
    return f"{env}={shlex.quote(str(value))}"


# ``SETTING=VALUE`` as a user writes it for ``--min`` and ``--set``: numbers as the engine's command
# line takes them.


def parse_assignment(text: str) -> tuple[str, FactValue]:
    """Read ``SETTING=VALUE``; raise SettingError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise SettingError(f"not SETTING=VALUE: {text!r}", hint="for example max_model_len=8192")
    knob = setting(name.strip())
    return knob.name, _value(knob.name, value.strip())


def _value(name: str, text: str) -> FactValue:
    """Read ``8k`` as 8000 and ``8K`` as 8192, as the first engine does, where the engine's own
    value is in our unit.
    """
    number = None
    if SETTINGS[name].type == "int" and surface(name, "").unit_bytes == 1:
        number = suffixed(text, grammar(engines()[0]).suffixes)
    return parse_value(name, text if number is None else str(number))
