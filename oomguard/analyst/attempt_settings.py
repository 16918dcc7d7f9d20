"""Find the settings an attempt really ran with, and whether our changes took effect."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from oomguard.core.facts import REGISTRY, Fact, FactValue, is_of_type
from oomguard.core.incident import Attempt, Incident, SettingInForce
from oomguard.core.log import get_logger
from oomguard.core.settings import SETTING_FACTS, SETTINGS
from oomguard.engines.command import Launch, StartedEngine, failed_engine, failed_model
from oomguard.engines.protocol import Launcher
from oomguard.engines.registry import insight_of
from oomguard.probe.checks import CUDA, HIP, PLAIN
from oomguard.scan.context import ARGUMENTS, SCRIPT, SHARE, requested_share

# Every program with torch reads these settings from a variable, so they are carried there, in
# addition to the engine's own settings.

ALLOCATOR: Final = "allocator_options"
# The devices that the command sees. Only a placed run has a value for it.
DEVICE: Final = "device"
BY_VARIABLE: Final = frozenset({ALLOCATOR, DEVICE})
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_BY_BUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# If both are set, torch reads the second for CUDA; before 2.10 it reads only that one. The third is
# for AMD devices.
_NAMES: Final = (PLAIN, CUDA)
# Sleep mode and KV transfer use memory pools, which do not support expandable segments.
_AGAINST: Final = ("--enable-sleep-mode", "--kv-transfer-config")


class EnvLauncher:
    """Extend an engine's launcher by settings in environment variables.

    Args:
        engine: the launcher of the command's engine.
        argv: the command; a variable that it sets itself stays.
    """

    def __init__(self, engine: Launcher, argv: tuple[str, ...]) -> None:
        self._engine = engine
        refusing = (*(f"{name}=" for name in (*_NAMES, HIP)), *_AGAINST)
        self._is_refused = any(word.startswith(refusing) for word in argv)
        self._engine_changes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def carries(self, name: str) -> bool:
        """Return whether a setting can change a launch."""
        if name == ALLOCATOR:
            return not self._is_refused and "expandable_segments" not in " ".join(_set().values())
        return name == DEVICE or self._engine.carries(name)

    def apply(self, launch: Launch, settings: Mapping[str, FactValue], session: Path) -> Launch:
        """Return the launch with these settings; allocator options and devices go to variables."""
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
        variables = {}
        for name, value in _merged(settings).items():
            if name == CUDA or name in _set():
                variables[name] = value
        variables |= _devices(settings)
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), line]
        )

    def took_effect(self, launch: Launch, session: Path) -> bool:
        """Return whether the settings of ``apply`` reached an engine; a variable always does."""
        return not self._engine_changes or self._engine.took_effect(launch, session)


def _others(settings: Mapping[str, FactValue]) -> dict[str, FactValue]:
    found = {}
    for name, value in settings.items():
        if name not in BY_VARIABLE:
            found[name] = value
    return found


def _devices(settings: Mapping[str, FactValue]) -> dict[str, str]:
    if DEVICE in settings:
        return {**_BY_BUS, _VISIBLE: str(settings[DEVICE])}
    return {}


def _set() -> dict[str, str]:
    """Return the allocator's variables of this process."""
    found = {}
    for name in (*_NAMES, HIP):
        if os.environ.get(name):
            found[name] = os.environ[name]
    return found


def _merged(settings: Mapping[str, FactValue]) -> dict[str, str]:
    """Return the variables with old and new options; empty without new options."""
    if ALLOCATOR not in settings:
        return {}
    own = _set()
    new = str(settings[ALLOCATOR])
    names = (*_NAMES, HIP) if HIP in own else _NAMES
    given = own.get(CUDA) or own.get(PLAIN)
    return {name: ",".join(filter(None, (own.get(name) or given, new))) for name in names}


# Facts with the requested value, if their name differs from the setting's fact.
_REQUESTS: Final = {"kv_cache_memory_bytes": "kv_cache_requested_bytes"}
# The source of a value that the engine reports after it has made its configuration.
IN_EFFECT: Final = "in effect"
_SMALLEST: Final = 1e-9


def given_settings(
    engine: Launcher, launch: Launch, started: Sequence[StartedEngine]
) -> dict[str, SettingInForce]:
    """Return the settings of a launch: the last engine's arguments, or else its flags."""
    if started:
        last = started[-1]
    else:
        last = None
    if last is None or last.arguments is None or engine.is_own_command(launch.argv):
        return engine.settings_in_force(launch)
    known = {"model": last.model} | dict(last.arguments)
    found = {}
    for name, value in known.items():
        if value is not None:
            found[name] = SettingInForce(name, value, True, ARGUMENTS)
    return found


def with_effective_settings(
    incident: Incident,
    *,
    engine: Launcher,
    first: Launch,
    launch: Launch,
    changed: Mapping[str, FactValue],
) -> Incident:
    """Return the incident with the values that its engine really had.

    Args:
        incident: the failure.
        engine: the launcher.
        first: the user's launch, with the changes of each engine.
        launch: the launch that failed.
        changed: all changes so far; they count for every engine if the engine is unknown.
    """
    if changed:
        patched = _with_patched(incident, first, engine.settings_in_force(first), changed)
    else:
        patched = incident
    insight = insight_of(engine)
    failed = failed_engine(incident, insight.started(launch))
    if failed is None:
        found = {}
    else:
        found = _contradicted(patched.settings, failed.in_effect)
    # A flag of the command may win over a variable, so the change never reached the engine.
    overridden_names = {}
    for setting in SETTINGS:
        over = insight.beaten_by(launch, setting, incident.facts)
        if over is not None:
            overridden_names[setting] = over
    found |= overridden_names
    facts = dict(patched.facts)
    overridden = patched.settings.get("kv_cache_memory_bytes")
    if (
        "kv_cache_memory_bytes" in overridden_names
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
    """Return numbers that differ from the given ones, and hard limits that no setting names."""
    found = {}
    for name, value in in_effect.items():
        # one thing may have two names, such as awq and awq_marlin
        if isinstance(value, (bool, str)):
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
    """Return the incident with the settings of earlier patches for its engine.

    Who chose a setting stays unchanged.
    """
    changed = dict(settings)
    if launch.engine_changes:
        changed = {}
        for change in launch.engine_changes:
            if change.reaches(failed_model(incident), None):
                changed.update(change.settings)
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
            # The printed value is from before the change.
            facts[fact] = Fact(fact, value, "patched")
    return replace(incident, settings=found, facts=facts)


def report_ineffective_change(
    attempt: Attempt, incident: Incident, engine: Launcher, launch: Launch
) -> bool:
    """Log the first change of an attempt without effect, and why; return whether there is one."""
    over = find_ineffective_change(
        attempt, incident, engine, launch, insight_of(engine).started(launch)
    )
    if over is not None:
        fields = {"setting": over.setting, "wanted": over.wanted, "in_force": over.shown}
        get_logger().warning(
            "The change did not take effect, so oomguard does not retry", **fields, because=over.why
        )
    return over is not None


@dataclass(frozen=True, slots=True)
class IneffectiveChange:
    """Describe a change without effect: the engine used ``shown``, because of ``why``."""

    setting: str
    wanted: FactValue
    shown: FactValue
    why: str


def find_ineffective_change(
    attempt: Attempt,
    incident: Incident,
    engine: Launcher,
    launch: Launch,
    started: Sequence[StartedEngine],
) -> IneffectiveChange | None:
    """Return the first change of an attempt without effect; None if all took effect.

    The failed engine's own report decides, or the value in its failure.
    """
    failed = failed_engine(incident, started)
    for patch in attempt.patches:
        if patch.new is None:
            continue
        if failed is not None:
            shown = failed.in_effect.get(patch.setting)
        else:
            shown = None
        fact = (
            Fact(patch.setting, shown) if shown is not None else _requested(patch.setting, incident)
        )
        if fact is None or _is(patch.new, fact) or not (patch.old is None or _is(patch.old, fact)):
            continue
        over = insight_of(engine).beaten_by(launch, patch.setting, incident.facts)
        if over is not None:
            why = f"{over.source} in the environment overrides flags and arguments"
        elif engine.is_own_command(launch.argv):
            why = "the engine itself sets it"
        else:
            why = "the program's own code sets it"
        return IneffectiveChange(patch.setting, patch.new, fact.value, why)
    return None


def _requested(name: str, incident: Incident) -> Fact | None:
    """Return the requested value of a setting as the failure itself prints it; None if absent."""
    fact = incident.facts.get(_REQUESTS.get(name, SETTING_FACTS.get(name, "")))
    if name == SHARE and _is_of_a_line(incident.facts.get("desired_bytes")):
        return requested_share(incident.facts)
    if _is_of_a_line(fact):
        return fact
    return None


def _is_of_a_line(fact: Fact | None) -> bool:
    """Return whether a line of the log prints a fact.

    Other facts show the program's own value from before our change.
    """
    return fact is not None and fact.line is not None


def _is(value: FactValue, fact: Fact) -> bool:
    if isinstance(value, str) or isinstance(fact.value, str):
        return str(value) == str(fact.value)
    return abs(value - fact.value) <= fact.slack + _SMALLEST * abs(value)
