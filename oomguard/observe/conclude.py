"""What a finished scan concludes: each incident and each start, completed by what the engine printed around them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import EngineStart, Incident, SettingInForce
from oomguard.observe.context import NEAR_BEFORE_LINES, NO_ENGINE, Context, Near, nearest_phase
from oomguard.observe.host_tasks import HostTasks
from oomguard.observe.incidents import ScannedIncident
from oomguard.observe.named_model import named_model
from oomguard.observe.settings_in_force import merged_settings, with_requested_share, without_contradicted

_RANK: Final = re.compile(r"(?<![A-Za-z])TP(\d{1,3})\b")
_OF_HOST: Final = "host_"
_BLOCKS_OF_OVERRIDE: Final = frozenset({"num_gpu_blocks_override", "kv_cache_fitting_blocks"})
# Figures that only an engine's start prints: a text that holds one is the log of a start.
_START_FACTS: Final = frozenset(
    {"model_weights_bytes", "kv_cache_available_bytes", "kv_cache_capacity_tokens", "framework_version"}
)

# Phases in which requests are served, and the one of a text that names none.
_OF_REQUESTS: Final = frozenset({"generate", "prefill", "decode", "unknown"})
# How vLLM's logger begins a record: "ERROR 02-14 11:08:20 worker.py:242]", in brackets since V1.
_VLLM_RECORD: Final = re.compile(r"\b[A-Z]{4,8} \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[?[\w/.-]+\.py:\d+\]")


def concluded_incident(
    scanned: ScannedIncident,
    given: Mapping[str, SettingInForce] | None,
    tasks: HostTasks | None = None,
    *,
    alone: bool = False,
    names_service: bool = False,
) -> Incident:
    """Return an incident with the settings in force, the facts, phase and frames that lie around its message.

    Args:
        scanned: the incident as it was found.
        given: settings that the caller knows; they win over those that the engine echoed.
        tasks: the kernel's tables of processes.
        names_service: lines of several services or pods are in the log: the process says whose it is.
        alone: no other failure was found: frames far behind its message are its own. Who reports one writes it first.
    """
    incident, context, near = scanned.incident, scanned.context, scanned.near
    if alone and not near:
        line = incident.location.line or 0
        near = context.beside(line, scanned.last_line, scanned.process, 0, behind=NEAR_BEFORE_LINES)
    if "tensor_parallel_size" not in incident.facts and (ranks := _ranks_seen(scanned)) > 1:
        seen = Fact("tensor_parallel_size", ranks, "solved")
        incident = replace(incident, facts={**incident.facts, seen.name: seen})
    if incident.kind == "host_oom":
        holder = {} if tasks is None else tasks.facts(incident.location.line or 0, scanned.last_line)
        scope = incident.facts.get("host_scope")
        if scope is not None and scope.value == "limit":
            holder.pop("host_total_bytes", None)  # the limit was reached: how much the host has does not matter
        incident = replace(incident, facts={**holder, **incident.facts})
    elif incident.kind != "engine_dead":  # limits and processes of the host say nothing of a device
        near = [n for n in near if not n.facts or not all(name.startswith(_OF_HOST) for name in n.facts)]
    settings, complete = merged_settings(context.settings, given or {}, echo_complete=context.settings_complete)
    # The message's own figures win, then the caller's settings, the engine's echo, and loose text last.
    loose = {
        **context.later_for(scanned.process),
        **incident.facts,
        **{name: fact for n in near for name, fact in n.facts.items()},
    }
    settings, stated = without_contradicted(settings, {**loose, **scanned.own}, complete=complete)
    facts = with_requested_share(_without_profiling_blocks({**loose, **stated, **scanned.own}))
    phase = incident.phase if scanned.phase_is_told else nearest_phase(near) or incident.phase
    if "start_frames" in facts and phase in _OF_REQUESTS:
        phase = "profile_run"  # the engine, or the compiler that it calls, runs the model to measure it
    version = facts.get("framework_version")
    frames = dict.fromkeys(n.evidence for n in near if n.phase or n.facts)
    evidence = (*incident.evidence, *(frame for frame in frames if frame not in incident.evidence))
    named = None if "model" in facts else named_model("\n".join(line.text for line in evidence))
    if named is not None:
        facts["stated_model"] = Fact("stated_model", named)
    location = incident.location
    if names_service and context.service is not None:
        location = replace(location, process=": ".join(filter(None, (context.service, location.process))))
    return replace(
        incident,
        location=location,
        kind=scanned.becomes.get(phase, incident.kind),
        phase=phase,
        framework=_host(scanned, near),
        facts=MappingProxyType(facts),
        evidence=evidence,
        settings=MappingProxyType(dict(settings)),
        settings_complete=complete,
        framework_version=str(version.value) if version else incident.framework_version,
    )


def _ranks_seen(scanned: ScannedIncident) -> int:
    """Return the number of ranks that share each layer by the names of the processes: the power of two that holds all."""
    names = (*scanned.context.by_process, scanned.process, *scanned.incident.also_in)
    seen = {int(found.group(1)) for name in names if name and (found := _RANK.search(name))}
    return 1 << max(seen).bit_length() if len(seen) > 1 else 1


def standing(found: list[ScannedIncident]) -> list[ScannedIncident]:
    """Leave out what the engine recovered from, and a wrapper ("See root cause above") beside its cause."""
    found = [f for f in found if not any("recovered" in near.facts and near.line >= f.last_line for near in f.near)]
    found = [f for f in found if f.incident.kind != "engine_dead" or not f.context.ending.was_told_before(f.last_line)]
    causes = {f.context.number for f in found if f.incident.kind != "engine_dead"}
    return [f for f in found if f.incident.kind != "engine_dead" or f.context.number not in causes]


def concluded_start(context: Context, given: Mapping[str, SettingInForce] | None) -> EngineStart | None:
    """Return what one start printed of itself; None if nothing in it tells a start from any other text.

    ``given`` as in ``concluded_incident``.
    """
    facts = context.all_facts()
    if not context.announced and not facts.keys() & _START_FACTS:
        return None
    settings, complete = merged_settings(context.settings, given or {}, echo_complete=context.settings_complete)
    settings, stated = without_contradicted(settings, facts, complete=complete)
    facts = with_requested_share(_without_profiling_blocks({**facts, **stated}))
    version = facts.get("framework_version")
    return EngineStart(
        number=context.number,
        framework=next(iter(context.frameworks.values()), "unknown"),
        framework_version=str(version.value) if version else None,
        line=context.first_line,
        facts=MappingProxyType(facts),
        settings=MappingProxyType(dict(settings)),
        settings_complete=complete,
    )


def _without_profiling_blocks(facts: dict[str, Fact]) -> dict[str, Fact]:
    """Leave out a number of KV blocks that the user's complete settings do not have: the engine profiled with it."""
    is_set = facts.get("num_gpu_blocks_override_set")
    if is_set is None or is_set.value:
        return facts
    return {name: fact for name, fact in facts.items() if name not in _BLOCKS_OF_OVERRIDE}


def _host(scanned: ScannedIncident, near: list[Near]) -> str:
    """Return the engine that hosts the failed code: torch's own message does not name it, nor the driver's, nor numpy's."""
    named = scanned.incident.framework
    if named not in {*NO_ENGINE, "unknown"} and not (named == "host" and "array_shape" in scanned.own):
        return named
    beside = next((n.framework for n in near if n.framework), None)
    own = beside or scanned.context.framework_for(scanned.process)
    if own in {None, *NO_ENGINE} and any(_VLLM_RECORD.search(line.text) for line in scanned.incident.evidence):
        return "vllm"
    return own or named
