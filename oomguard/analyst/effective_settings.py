"""Which values an attempt really ran with: what its engine was given, what was changed, and whether
that took effect.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomguard.core.facts import REGISTRY, Fact, FactValue, is_of_type
from oomguard.core.files import read_regular
from oomguard.core.incident import Attempt, Incident, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.setting_spellings import surface
from oomguard.core.settings import SETTING_FACTS, SETTINGS
from oomguard.engines.command import Launch
from oomguard.engines.protocol import Launcher
from oomguard.engines.registry import insight_of
from oomguard.engines.start_attempt import StartedEngine, failed_engine, failed_model
from oomguard.probe.environment_variables import CUDA, HIP, PLAIN
from oomguard.remedy.policy import is_out_of_question
from oomguard.scan.effective_settings import ARGUMENTS, SCRIPT, SHARE, requested_share

if TYPE_CHECKING:
    import yaml


# Settings that every program with torch in it reads from a variable: carried there, beside what
# the engine itself carries.

ALLOCATOR: Final = "allocator_options"
# Which devices it sees. Only who places a run has a value for it.
DEVICE: Final = "device"
BY_VARIABLE: Final = frozenset({ALLOCATOR, DEVICE})
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_BY_BUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# torch reads the second for CUDA where both are set, and before 2.10 only that one; the third is of
# AMD's devices.
_NAMES: Final = (PLAIN, CUDA)
# vLLM's memory pools do not take expandable segments.
_AGAINST: Final = ("--enable-sleep-mode", "--kv-transfer-config")


class WithVariables:
    """An engine's launcher that carries the allocator's options too; all else is the launcher's
    own.

    Args:
        engine: how the command's engine is started.
        argv: the command, which may set the variable itself: that stays.
    """

    def __init__(self, engine: Launcher, argv: tuple[str, ...]) -> None:
        self._engine = engine
        refusing = (*(f"{name}=" for name in (*_NAMES, HIP)), *_AGAINST)
        self._is_refused = any(word.startswith(refusing) for word in argv)
        self._engine_changes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def carries(self, name: str) -> bool:
        """Return whether a launch can be changed by a setting."""
        if name == ALLOCATOR:
            return not self._is_refused and not any(
                "expandable_segments" in value for value in _set().values()
            )
        return name == DEVICE or self._engine.carries(name)

    def apply(self, launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
        """Return the launch with these settings, the allocator's options and the devices in its
        variables.
        """
        others = _others(settings)
        self._engine_changes = bool(others)
        if others:
            changed = self._engine.apply(launch, others, session)
        else:
            changed = launch
        return replace(changed, env={**changed.env, **_merged(settings), **_devices(settings)})

    def shown(self, launch: Launch, settings: Mapping[str, FactValue]) -> str:
        """Return a line to paste that runs the launch with these settings."""
        line = self._engine.shown(launch, _others(settings))
        variables = {
            name: value
            for name, value in _merged(settings).items()
            if name == CUDA or name in _set()
        }
        variables |= _devices(settings)
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), line]
        )

    def took_effect(self, launch: Launch, session: Path) -> bool:
        """Return whether the settings of ``apply`` reached an engine: a variable does."""
        return not self._engine_changes or self._engine.took_effect(launch, session)


def _others(settings: Mapping[str, FactValue]) -> dict[str, FactValue]:
    return {name: value for name, value in settings.items() if name not in BY_VARIABLE}


def _devices(settings: Mapping[str, FactValue]) -> dict[str, str]:
    if DEVICE in settings:
        return {**_BY_BUS, _VISIBLE: str(settings[DEVICE])}
    return {}


def _set() -> dict[str, str]:
    """Return the allocator's variables that are set here."""
    return {name: os.environ[name] for name in (*_NAMES, HIP) if os.environ.get(name)}


def _merged(settings: Mapping[str, FactValue]) -> dict[str, str]:
    """Return the variables with the options that are set and the new ones; none where there are no
    new ones.
    """
    if ALLOCATOR not in settings:
        return {}
    own = _set()
    new = str(settings[ALLOCATOR])
    names = (*_NAMES, HIP) if HIP in own else _NAMES
    given = own.get(CUDA) or own.get(PLAIN)
    return {name: ",".join(filter(None, (own.get(name) or given, new))) for name in names}


# Which file of a job gives a setting: a change reaches an engine for one run, and is kept by
# editing what the job read.
#
# Looked at are YAML and JSON files that the command's arguments name. A key counts where it is
# spelled as the setting is, in any section, and has the value that the engine was given.

_ENDS: Final = (".yaml", ".yml", ".json")
_MOST_BYTES: Final = 1 << 20
_MOST_NODES: Final = 10_000


@dataclass(frozen=True, slots=True)
class SettingLocation:
    """Where a file gives a value: the file as the command names it, its line, and the key with its
    sections.
    """

    file: str
    line: int
    key: str


def tell_places(argv: Sequence[str], incident: Incident) -> None:
    """Say which keys of the job's own files give what the plan solved; nothing where none does."""
    for patch in incident.plan:
        if patch.new is None or patch.old is None or is_out_of_question(patch):
            continue
        for place in places_of(argv, patch.setting, patch.old, incident.framework):
            told = {
                "setting": patch.setting,
                "file": place.file,
                "line": place.line,
                "key": place.key,
            }
            get_logger().info(
                "the job's own file gives it; to keep a change, edit it there",
                **told,
                then=patch.new,
            )


def places_of(
    argv: Sequence[str], setting: str, value: FactValue, engine: str
) -> list[SettingLocation]:
    """Return the places where the files among a command's arguments give a setting this value, in
    their order.
    """
    own = surface(setting, engine)
    names = {
        _plain(name)
        for name in (setting, own.kwarg, own.config_key, *own.flags, *own.aliases)
        if name
    }
    found = []
    for file in dict.fromkeys(word.rpartition("=")[2] for word in argv if word.endswith(_ENDS)):
        given = {
            place.key: (place, text)
            for place, text in _read(file)
            if _plain(place.key.split(".")[-1]) in names
        }
        found += [
            place for place, text in given.values() if _job_files_is(text, own.own(value))
        ]  # of a repeated key the last one
    return found


def _read(file: str) -> Iterator[tuple[SettingLocation, str]]:
    """Yield every key of a file that has a plain value, with its text; nothing of a file that
    cannot be read.
    """
    import yaml

    try:
        root = yaml.compose(read_regular(Path(file), _MOST_BYTES).decode(), Loader=yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    waiting: list[tuple[tuple[str, ...], yaml.Node | None]] = [((), root)]
    left = _MOST_NODES  # names for parts let a short file stand for endless ones
    while waiting and left > 0:
        keys, node = waiting.pop(0)
        if isinstance(node, yaml.MappingNode):
            pairs = node.value
        else:
            pairs = ()
        left -= 1 + len(pairs)
        for key, part in pairs:
            below = (*keys, str(key.value))
            if isinstance(part, yaml.ScalarNode):
                yield (
                    SettingLocation(file, part.start_mark.line + 1, ".".join(below)),
                    str(part.value),
                )
            else:
                waiting.append((below, part))


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_").lower()


def _job_files_is(text: str, value: FactValue) -> bool:
    if isinstance(value, (bool, str)):
        return text.lower() == str(value).lower()
    try:
        return math.isclose(float(text), value)
    except (ValueError, OverflowError):
        return False


# Facts in which a failure prints what was asked for, where it is not the setting's own.
_REQUESTS: Final = {"kv_cache_memory_bytes": "kv_cache_requested_bytes"}
# The source of a value that the engine itself tells once it has made its configuration.
IN_EFFECT: Final = "in effect"
_SMALLEST: Final = 1e-9


def given_settings(
    engine: Launcher, launch: Launch, started: Sequence[StartedEngine]
) -> dict[str, SettingInForce]:
    """Return the settings that a launch gives: what its last engine was given where that was told,
    else its own flags.
    """
    if started:
        told = started[-1]
    else:
        told = None
    if told is None or told.arguments is None or engine.is_own_command(launch.argv):
        return engine.settings_in_force(launch)
    known = {"model": told.model} | dict(told.arguments)
    return {
        name: SettingInForce(name, value, True, ARGUMENTS)
        for name, value in known.items()
        if value is not None
    }


def as_it_ran(
    incident: Incident,
    *,
    engine: Launcher,
    first: Launch,
    launch: Launch,
    changed: Mapping[str, FactValue],
) -> Incident:
    """Return the incident with the values that its engine really had: changed ones, and those that
    something sets over all.

    Args:
        incident: what failed.
        engine: how it is started.
        first: the launch as the user gave it, with the changes of each engine.
        launch: the launch that failed.
        changed: all that was changed so far; for every engine, where it is not known for which.
    """
    if changed:
        patched = _with_patched(incident, first, engine.settings_in_force(first), changed)
    else:
        patched = incident
    insight = insight_of(engine)
    told = failed_engine(incident, insight.started(launch))
    if told is None:
        found = {}
    else:
        found = _contradicted(patched.settings, told.in_effect)
    beaten = {
        name: over
        for name in SETTINGS
        if (over := insight.beaten_by(launch, name, incident.facts)) is not None
    }
    found |= beaten
    facts = dict(patched.facts)
    overridden = patched.settings.get("kv_cache_memory_bytes")
    if (
        "kv_cache_memory_bytes" in beaten
        and overridden is not None
        and isinstance(overridden.value, int)
    ):
        facts["overridden_kv_cache_bytes"] = Fact(
            "overridden_kv_cache_bytes", overridden.value, overridden.source
        )
    facts |= {name: Fact(name, limit, "measured") for name, limit in insight.limits(launch).items()}
    for name, over in found.items():
        fact, asked = SETTING_FACTS.get(name), f"{name}_set"
        if fact is not None and over.value is not None and not _is_of_a_line(facts.get(fact)):
            facts[fact] = Fact(fact, over.value, over.source)
        if asked in REGISTRY:
            facts[asked] = Fact(asked, True, over.source)
    return replace(patched, settings={**patched.settings, **found}, facts=facts)


def _contradicted(
    settings: Mapping[str, SettingInForce], in_effect: Mapping[str, FactValue]
) -> dict[str, SettingInForce]:
    """Return the numbers for which the engine goes on with another one than it was given, and
    limits that nobody listed.
    """
    found = {}
    for name, value in in_effect.items():
        if isinstance(value, (bool, str)):  # one thing may have two names: awq, awq_marlin
            continue
        given = settings.get(name)
        differs = (
            given is not None and given.source != "patched" and given.value not in {None, value}
        )
        if differs or (given is None and name in SETTINGS and SETTINGS[name].hard_limit):
            found[name] = SettingInForce(name, value, True, IN_EFFECT)
    return found


def _with_patched(
    incident: Incident,
    launch: Launch,
    first: Mapping[str, SettingInForce],
    settings: Mapping[str, FactValue],
) -> Incident:
    """Return the incident with what earlier patches set for its engine; whose choice a setting was
    stays as it was.
    """
    changed = dict(settings)
    if launch.engine_changes:
        meant = [
            change.settings
            for change in launch.engine_changes
            if change.reaches(failed_model(incident), None)
        ]
        changed = {name: value for one in meant for name, value in one.items()}
    found = dict(incident.settings)
    facts = dict(incident.facts)
    for name, value in changed.items():
        chosen = first.get(name)
        echoed = found.get(name)
        if chosen is not None and not (chosen.source == SCRIPT and incident.settings_complete):
            by_user = chosen.set_by_user
        elif echoed is not None and echoed.source != "command":
            by_user = echoed.set_by_user
        else:  # a flag that only the changed command has is ours
            by_user = False
        found[name] = SettingInForce(name, value, by_user, "patched")
        fact = SETTING_FACTS.get(name, "")
        if fact in facts and not _is_of_a_line(facts[fact]) and is_of_type(fact, value):
            facts[fact] = Fact(fact, value, "patched")  # listed as it was before the change
    return replace(incident, settings=found, facts=facts)


def tell_unheeded(attempt: Attempt, incident: Incident, engine: Launcher, launch: Launch) -> bool:
    """Say which change of an attempt did not take effect, and why; return whether there is one."""
    over = unheeded(attempt, incident, engine, launch, insight_of(engine).started(launch))
    if over is not None:
        told = {"setting": over.setting, "wanted": over.wanted, "in_force": over.shown}
        get_logger().warning(
            "the change did not take effect: nothing is run again", **told, because=over.why
        )
    return over is not None


@dataclass(frozen=True, slots=True)
class Unheeded:
    """A change that did not take effect: the engine went on with ``shown``, since ``why``."""

    setting: str
    wanted: FactValue
    shown: FactValue
    why: str


def unheeded(
    attempt: Attempt,
    incident: Incident,
    engine: Launcher,
    launch: Launch,
    started: Sequence[StartedEngine],
) -> Unheeded | None:
    """Return the first of an attempt's changes that did not take effect, by what its failed engine
    told or printed; else None.
    """
    told = failed_engine(incident, started)
    for patch in attempt.patches:
        if patch.new is None:
            continue
        if told is not None:
            shown = told.in_effect.get(patch.setting)
        else:
            shown = None
        fact = (
            Fact(patch.setting, shown) if shown is not None else _requested(patch.setting, incident)
        )
        if fact is None or _is(patch.new, fact) or not (patch.old is None or _is(patch.old, fact)):
            continue
        over = insight_of(engine).beaten_by(launch, patch.setting, incident.facts)
        if over is not None:
            why = f"{over.source} in the environment sets it over flags and arguments"
        elif engine.is_own_command(launch.argv):
            why = "the engine itself sets it"
        else:
            places = places_of(launch.argv, patch.setting, fact.value, incident.framework)
            given = "".join(
                f"; {place.file}, line {place.line}, has it as {place.key}" for place in places[:1]
            )
            why = f"the program's own code sets it{given}"
        return Unheeded(patch.setting, patch.new, fact.value, why)
    return None


def _requested(name: str, incident: Incident) -> Fact | None:
    """Return what a failure itself prints of a setting that was asked for."""
    fact = incident.facts.get(_REQUESTS.get(name, SETTING_FACTS.get(name, "")))
    if name == SHARE and _is_of_a_line(incident.facts.get("desired_bytes")):
        return requested_share(incident.facts)
    if _is_of_a_line(fact):
        return fact
    return None


def _is_of_a_line(fact: Fact | None) -> bool:
    """Return whether a line of the log prints a fact; what the program gave is listed before it is
    changed for us.
    """
    return fact is not None and fact.line is not None


def _is(value: FactValue, fact: Fact) -> bool:
    if isinstance(value, str) or isinstance(fact.value, str):
        return str(value) == str(fact.value)
    return abs(value - fact.value) <= fact.slack + _SMALLEST * abs(value)
