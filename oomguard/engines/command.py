"""Read the settings in a command line's flags, and change a flag."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.errors import SettingError
from oomguard.core.facts import FactValue
from oomguard.core.files import read_tables
from oomguard.core.incident import Incident, Patch, SettingInForce
from oomguard.core.settings import (
    SETTINGS,
    Surface,
    flag_words,
    grammar,
    surface,
    surfaces,
    value_in_force,
)
from oomguard.engines.unwrap_command import Edit, Unread, replaced

_LONG: Final = "--"
# A short flag has one letter, and its value may follow without a space.
_SHORT_CHARS: Final = 2


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag in a command line, from word ``start`` up to ``end``.

    ``text`` is its value; None for a switch, whose state is ``on``, and for a flag without a value.
    ``keys`` is the path to the value inside a JSON object. ``is_inside`` says that another flag's
    JSON object contains the setting.
    """

    name: str
    start: int
    end: int
    text: str | None
    on: bool | None
    keys: tuple[str, ...] = ()
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class _Known:
    """An engine's flags: those that set a setting, switch it off, or hold it in a JSON object."""

    sets: Mapping[str, str]
    off: Mapping[str, str]
    inside: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, Surface]


@functools.cache
def _known(engine: str) -> _Known:
    rows = surfaces(engine)
    sets: dict[str, str] = {}
    off: dict[str, str] = {}
    inside: dict[str, dict[str, str]] = {}
    for name, newest in rows.items():
        for own in (newest, *newest.others):
            sets |= dict.fromkeys((*own.flags, *own.aliases), name)
            if own.off_flag and SETTINGS[name].type == "bool":
                off[own.off_flag] = name
        for flag, key in newest.inside:
            inside.setdefault(flag, {})[key] = name
    return _Known(sets, off, inside, rows)


def flags_in(words: Sequence[str], engine: str, *, own: bool = False) -> Iterator[Flag]:
    """Find the flags of an engine, of any version and spelling, in a command line.

    Flags have dashes or underscores, as ``FLAG VALUE`` or ``FLAG=VALUE``.

    Args:
        words: the command line, or a part of it.
        engine: the engine's name.
        own: whether the engine's own parser reads the words, with its abbreviations and its dotted
            keys.
    """
    known = _known(engine)
    at = 0
    while at < len(words):
        found = _flag_at(words, at, known, engine, own=own)
        if found is not None:
            yield found
        at += 1
        if found is not None and found.text is not None:
            at = max(at, found.end)


def _flag_at(
    words: Sequence[str], at: int, known: _Known, engine: str, *, own: bool
) -> Flag | None:
    rules = grammar(engine)
    spelled, equals, text = words[at].partition("=")
    if not spelled.startswith("-"):
        return None
    keys: tuple[str, ...] = ()
    if own and rules.dotted:
        spelled, *more = spelled.split(".")
        keys = tuple(more)
    if spelled.startswith(_LONG):
        spelled = spelled.replace("_", "-")
    exact = spelled in known.sets or spelled in known.off or spelled in known.inside
    if own and rules.abbreviations and not exact:
        if spelled[:_SHORT_CHARS] in known.sets and not spelled.startswith(_LONG) and not equals:
            return Flag(
                known.sets[spelled[:_SHORT_CHARS]], at, at + 1, spelled[_SHORT_CHARS:], None
            )
        spelled = _unabbreviated(spelled, known, rules.whole) or spelled
    name = known.sets.get(spelled) or known.off.get(spelled)
    if name is not None and SETTINGS[name].type == "bool":
        return Flag(name, at, at + 1, None, spelled not in known.off)
    end = at + 1
    if not equals:
        end = _end_of_values(
            words, at, many=name is not None and known.rows[name].many and not keys
        )
        if end == at + 2:
            text = words[at + 1]
        else:
            text = " ".join(words[at + 1 : end])
    elif isinstance(words[at], Unread):
        text = Unread(text)
    if equals or end > at + 1:
        value = text
    else:
        value = None
    if name is not None:
        return Flag(name, at, end, value, None, keys)
    return _inside(known.inside.get(spelled, {}), at, end, value, keys)


def _unabbreviated(spelled: str, known: _Known, whole: Sequence[str]) -> str | None:
    """Return the full flag for a unique prefix, as argparse finds it; None if it is ambiguous."""
    if spelled in whole or len(spelled) <= len(_LONG) or not spelled.startswith(_LONG):
        return None
    flags = _starting_with(spelled, (*known.sets, *known.off, *known.inside))
    # Several spellings of one setting are not ambiguous.
    meant = {known.sets.get(flag, flag) for flag in flags}
    if len(meant) == 1:
        return flags[0]
    return None


def _starting_with(beginning: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(beginning)]


def _end_of_values(words: Sequence[str], at: int, *, many: bool) -> int:
    end = at + 1
    while many and end < len(words) and not words[end].startswith(_LONG):
        end += 1
    if many:
        return end
    return min(at + 2, len(words))


def _inside(
    names: Mapping[str, str], at: int, end: int, text: str | None, keys: tuple[str, ...]
) -> Flag | None:
    """Return the setting in a JSON flag's object; None without a known one."""
    if not names or text is None:
        return None
    if keys:
        if keys[0] in names:
            return Flag(names[keys[0]], at, end, text, None, is_inside=True)
        return None
    held = _as_object(text)
    for key, name in names.items():
        if held is not None and key in held:
            return Flag(name, at, end, json.dumps(held[key]), None, is_inside=True)
    return None


def _as_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict):
        return found
    return None


def merged_object(parts: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Return flags of single keys joined into one JSON object; the last of repeated keys counts."""
    whole: dict[str, Any] = {}
    for keys, text in parts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        inner = whole
        for key in keys[:-1]:
            below = inner.get(key)
            if not isinstance(below, dict):
                below = inner[key] = {}
            inner = below
        inner[keys[-1]] = value
    return json.dumps(whole)


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine that a program started, as its plugin reported it.

    Settings are by canonical name.

    Attributes:
        model: the model, as the program named it; None if it was not reported.
        order: its number among the engines of its process, from 1.
        process: the id of the process that started it.
        arguments: what the program gave it; None if it was not reported.
        in_effect: the effective settings in its configuration.
        changed: the settings that oomguard changed.
    """

    model: str | None
    order: int
    process: int
    arguments: Mapping[str, FactValue] | None = None
    in_effect: Mapping[str, FactValue] = field(default_factory=dict)
    changed: Mapping[str, FactValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineChange:
    """New settings for the engines of one model, or for one engine.

    ``model`` None: any model. ``order`` None: any engine.
    """

    model: str | None
    order: int | None
    settings: Mapping[str, FactValue]

    def reaches(self, model: str | None, order: int | None) -> bool:
        """Return whether the change may be for an engine; None means unknown."""
        same_model = self.model is None or model is None or self.model == model
        return same_model and (self.order is None or order is None or self.order == order)


def failed_model(incident: Incident) -> str | None:
    """Return the model of the failed engine, as the engine printed it; None if it did not."""
    known = value_in_force("model", incident.settings, incident.facts)
    if known is not None and isinstance(known[0], str):
        return known[0]
    return None


def failed_engine(incident: Incident, started: Sequence[StartedEngine]) -> StartedEngine | None:
    """Return the engine that failed; None if several are possible.

    A failed start is the last one. Among serving engines only the model can identify it.
    """
    model = failed_model(incident)
    if incident.is_at_start:
        last = started[-1:]
        if last and (model is None or last[0].model in {None, model}):
            return last[0]
        return None
    same = []
    for engine in started:
        if model is None or engine.model in {None, model}:
            same.append(engine)
    if len(same) == 1:
        return same[0]
    return None


def changes_with(
    changes: Sequence[EngineChange],
    incident: Incident,
    started: Sequence[StartedEngine],
    new: Mapping[str, FactValue],
) -> tuple[EngineChange, ...]:
    """Return the changes with new settings for the failed engine, and the others unchanged."""
    engine = failed_engine(incident, started)
    several = len(started) > 1 and len({engine.process for engine in started}) == 1
    model = failed_model(incident)
    order = None
    if engine is not None and several:
        order = engine.order
    joined = list(changes)
    for index, change in enumerate(changes):
        if (change.model, change.order) == (model, order):
            joined[index] = EngineChange(model, order, {**change.settings, **new})
            return tuple(joined)
    return (*changes, EngineChange(model, order, dict(new)))


@dataclass(frozen=True, slots=True)
class Launch:
    """A command to start, with environment variables in addition to the inherited ones.

    Attributes:
        argv: the command's words.
        env: the additional variables.
        engine_version: the version of its engine, which determines the spelling of flags; None if
            it is unknown.
        engine_models: the models whose engines failed, as the engines printed them. Only these
            engines are changed in a program that starts several. Empty if none was printed.
        engine_changes: the settings of each failed engine, if a program starts several.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    engine_version: str | None = None
    engine_models: tuple[str, ...] = ()
    engine_changes: tuple[EngineChange, ...] = ()

    def shell(self) -> str:
        """Return the launch as a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def with_failed_engine(launch: Launch, incident: Incident) -> Launch:
    """Return the launch with the version and the model that the failed engine printed."""
    # If the engine did not print its model, the change must be possible for every model.
    model = failed_model(incident)
    models: tuple[str, ...] = ()
    if model is not None:
        models = tuple(dict.fromkeys((*launch.engine_models, model)))
    return replace(
        launch,
        engine_version=incident.framework_version or launch.engine_version,
        engine_models=models,
    )


def with_change(
    launch: Launch, incident: Incident, started: Sequence[StartedEngine], patches: Sequence[Patch]
) -> Launch:
    """Return the launch with patches for the failed engine, and other engines unchanged."""
    new: dict[str, FactValue] = {}
    for patch in patches:
        if patch.new is not None:
            new[patch.setting] = patch.new
    if not new:
        return launch
    changes = changes_with(launch.engine_changes, incident, started, new)
    return replace(launch, engine_changes=changes)


def without_changes(launch: Launch, names: Collection[str]) -> Launch:
    """Return the launch without changes of these settings."""
    left = []
    for change in launch.engine_changes:
        settings = dict(change.settings)
        for name in names:
            settings.pop(name, None)
        if settings:
            left.append(replace(change, settings=settings))
    return replace(launch, engine_changes=tuple(left))


def settings_given(
    words: Sequence[str], engine: str, *, own: bool = False
) -> dict[str, SettingInForce]:
    """Return the settings that a command's flags give; the last of repeated flags counts.

    ``own`` says that the engine's own parser reads the words.
    """
    found: dict[str, SettingInForce] = {}
    objects: dict[str, list[tuple[tuple[str, ...], str]]] = {}
    for flag in flags_in(words, engine, own=own):
        if flag.keys:
            if flag.text is not None:
                objects.setdefault(flag.name, []).append((flag.keys, flag.text))
            continue
        found[flag.name] = SettingInForce(flag.name, value_of(flag, engine), True, "command")
    # The parser merges single keys after all flags with whole objects.
    for name, parts in objects.items():
        found[name] = SettingInForce(name, merged_object(parts), True, "command")
    return found


def value_of(flag: Flag, engine: str) -> FactValue | None:
    """Return a flag's value in oomguard's units.

    None if only the shell knows the value, or if the engine finds it itself.
    """
    own = surface(flag.name, engine)
    if flag.text is None:
        return flag.on
    if isinstance(flag.text, Unread) or flag.text.strip().lower() in own.automatic:
        return None
    try:
        return own.from_engine(flag.name, flag.text)
    except SettingError:
        # Only the engine can read a value in this form.
        return flag.text


def with_flag(launch: Launch, name: str, value: FactValue, engine: str) -> Launch:
    """Return the launch with one flag changed in place, or added at the end.

    Its other spellings are removed.

    Raises:
        KeyError: the engine has no flag for the setting.
    """
    edits = flag_edits(launch.argv, name, value, engine, launch.engine_version)
    return replace(launch, argv=replaced(launch.argv, edits))


def flag_edits(
    words: Sequence[str],
    name: str,
    value: FactValue,
    engine: str,
    version: str | None = None,
    *,
    own: bool = False,
    at_end: bool = False,
) -> list[Edit]:
    """Return the edits that set one flag; the last occurrence changes, earlier ones are removed.

    Args:
        words: the command.
        name: the setting.
        value: its new value.
        engine: the engine's name.
        version: the engine's version, which determines the spelling; None: the newest.
        own: whether the engine's own parser reads the words.
        at_end: add the flag at the end, because unread words may set it too.

    Raises:
        KeyError: the engine has no flag for the setting.
    """
    new = flag_words(name, value, engine, version)
    if new is None:
        raise KeyError(name)
    edits = []
    for flag in flags_in(words, engine, own=own):
        # A key inside a JSON object stays: the engine lets the flag override it.
        if flag.name == name and not flag.is_inside:
            edits.append(Edit(flag.start, flag.end, ()))
    if at_end or not edits:
        return [*edits, Edit(len(words), len(words), tuple(new))]
    return [*edits[:-1], replace(edits[-1], words=tuple(new))]


# Read all server flags of an engine, of any version, from engines/<engine>/flags.toml.


_OFF: Final = "no-"


@dataclass(frozen=True, slots=True)
class AllFlags:
    """Flags by their long names without dashes.

    Attributes:
        alone: switches without a value.
        perhaps: flags with an optional value.
        one: flags with one value.
        many: flags that take all words up to the next flag.
        short: short forms, each with its long name.
        takes_memory: flags that no plan counts but that change memory use, each with the reason.
        means: flags that set several settings, each with these settings.
    """

    alone: frozenset[str]
    perhaps: frozenset[str]
    one: frozenset[str]
    many: frozenset[str]
    short: Mapping[str, str]
    takes_memory: Mapping[str, str]
    means: Mapping[str, Mapping[str, str]]

    @property
    def names(self) -> frozenset[str]:
        """All names, without the ``no-`` forms."""
        return self.alone | self.perhaps | self.one | self.many

    def name_of(self, word: str) -> str | None:
        """Return the name of a flag, with ``no-`` if it switches off; None if no version has it.

        Like the engine's parser: underscores count as dashes, ``FLAG.KEY`` is a key of the flag's
        object, and a unique prefix is enough. After a short flag the value may follow directly.
        """
        flag = word.partition("=")[0]
        if not flag.startswith(_LONG):
            return self.short.get(flag.partition(".")[0]) or self.short.get(flag[:_SHORT_CHARS])
        name = flag.removeprefix(_LONG).partition(".")[0].replace("_", "-")
        if not name or self._is_flag(name):
            return name or None
        switches = (_OFF + switch for switch in self.alone)
        begun = _starting_with(name, (*self.names, *switches))
        if len(begun) == 1:
            return begun[0]
        return None

    def end_of(self, words: Sequence[str], at: int, name: str) -> int:
        """Return the index after the last value of the flag at ``at``."""
        flag = words[at].partition(".")[0]
        # `-O3` has its value in the same word.
        holds = "=" in flag or not (flag.startswith(_LONG) or flag in self.short)
        if holds or "=" in words[at] or name.removeprefix(_OFF) in self.alone:
            return at + 1
        end = at + 1
        while (
            end < len(words)
            and not words[end].startswith(_LONG)
            and (end == at + 1 or name in self.many)
        ):
            end += 1
        return end

    def _is_flag(self, name: str) -> bool:
        return name in self.names or name.removeprefix(_OFF) in self.alone


@functools.cache
def all_flags(engine: str) -> AllFlags:
    """Return the flags of an engine that has a flags.toml."""
    file = Path(__file__).parent / engine / "flags.toml"
    (table,) = read_tables("all_flags", [file]).values()
    return AllFlags(
        frozenset(table["alone"]),
        frozenset(table["perhaps"]),
        frozenset(table["one"]),
        frozenset(table["many"]),
        table["short"],
        table["takes_memory"],
        table["means"],
    )
