"""Write JSON: the contract's objects of schema 1, whose keys may be added but never renamed.

``json_line`` writes every JSON that another program reads. ``presentable.masked`` masks a record's
texts before that, and ``plain_value`` removes values that JSON cannot contain.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomguard.core.incident import Action, Budget, Diagnosis, EngineStart, Evidence, Incident, Patch
from oomguard.core.presentable import masked, well_formed

# Other programs read this. Keys may be added, but none is renamed or removed.
SCHEMA: Final = 1
# JSON allows these characters unescaped, but a terminal or a strict reader may not: DEL, C1
# controls, changed text direction, lone surrogates.
_ESCAPED: Final = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as the contract's object.

    Texts are masked, but ``source`` is exactly as given.
    """
    shown = masked(diagnosis)
    snapshot: dict[str, Any] = {}
    if shown.snapshot is not None:
        from oomguard.report.snapshot import snapshot_dict

        snapshot = {"snapshot": plain_value(snapshot_dict(shown.snapshot))}
    return {
        "schema": SCHEMA,
        # A program may open the file of this name, so the name is not masked.
        "source": diagnosis.source,
        "verdict": diagnosis.verdict,
        "incidents": list(map(_incident, shown.incidents)),
        "starts": list(map(_start, shown.starts)),
        **snapshot,
        **({"notes": plain_value(shown.notes)} if shown.notes else {}),
    }


def incident_dict(incident: Incident) -> dict[str, Any]:
    """Return one incident as the contract's object, with masked texts."""
    return _incident(masked(incident))


def stored_incident(incident: Incident) -> dict[str, Any]:
    """Return one incident for storage: the contract's object plus the rounding of its figures."""
    # Without the rounding, a later reader would take printed figures for exact ones.
    slack = {}
    for name, fact in sorted(incident.facts.items()):
        if fact.slack:
            slack[name] = fact.slack
    return incident_dict(incident) | {"slack": plain_value(slack)}


def patch_dict(patch: Patch) -> dict[str, Any]:
    """Return one patch as the contract's object, with masked texts."""
    return _patch(masked(patch))


def to_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as one line of JSON."""
    return json_line(to_dict(diagnosis))


def json_line(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Write an object or a list as one line of JSON that every reader and terminal accepts.

    Raises:
        ValueError: if it contains NaN or infinity, which ``plain_value`` removes.
    """
    # Escaping every letter beyond ASCII would make a log in another language unreadable.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def plain_value(value: object) -> Any:
    """Return a value that JSON can contain.

    NaN, infinity and numbers beyond a double become None; lone surrogates are replaced.
    """
    # A bool is an int too, so it comes first.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        if _is_finite(value):
            return value
        return None
    if isinstance(value, Mapping):
        return {well_formed(str(key)): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain_value, value))
    return well_formed(str(value))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        # An integer beyond a double has no JSON number that every reader accepts.
        return False


def _incident(incident: Incident) -> dict[str, Any]:
    place = incident.location
    # In a fixed order, two answers about one log are equal texts.
    facts = {}
    for name, fact in sorted(incident.facts.items()):
        facts[name] = fact.value
    causes = []
    for cause in incident.causes:
        causes.append(
            {
                "id": cause.id,
                "rule": cause.rule,
                "confidence": cause.confidence,
                "evidence": _evidence(cause.evidence),
                "explanation": cause.explanation,
                "title": cause.title,
                "confirm": cause.confirm,
            }
        )
    alternatives = []
    for a in incident.alternatives:
        alternatives.append(
            {
                "setting": a.setting,
                "to": a.new,
                "why_not": a.why_not,
                "as_flag": a.as_flag,
                "as_kwarg": a.as_kwarg,
            }
        )
    row = {
        "kind": incident.kind,
        "is_oom": incident.is_oom,
        "framework": incident.framework,
        "framework_version": incident.framework_version,
        "phase": incident.phase,
        "message": incident.message,
        "location": {"line": place.line, "byte": place.byte, "process": place.process},
        "repeated": incident.repeated,
        "start": incident.start,
        "also_in": incident.also_in,
        "wrappers": _evidence(incident.wrappers),
        "facts": facts,
        "causes": causes,
        "actions": list(map(_action, incident.actions)),
        "plan": list(map(_patch, incident.plan)),
        "budget": _budget(incident.budget),
        "alternatives": alternatives,
        "unknown": incident.unknown,
        "missing": incident.missing
        and {"what": incident.missing.what, "command": incident.missing.command},
        # Further digits of a probability mean nothing.
        "certainty": None
        if incident.certainty_ratio is None
        else round(incident.certainty_ratio, 3),
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def _start(start: EngineStart) -> dict[str, Any]:
    facts = {}
    for name, fact in sorted(start.facts.items()):
        facts[name] = fact.value
    settings = {}
    for name, setting in sorted(start.settings.items()):
        settings[name] = {
            "value": setting.value,
            "set_by_user": setting.set_by_user,
            "source": setting.source,
        }
    row = {
        "start": start.number,
        "framework": start.framework,
        "framework_version": start.framework_version,
        "line": start.line,
        "facts": facts,
        "settings": settings,
        "settings_complete": start.settings_complete,
        "budget": _budget(start.budget),
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def _action(action: Action) -> dict[str, Any]:
    row = {
        "id": action.id,
        "direction": action.direction,
        "from": action.old,
        "to": action.new,
        "effect": None if action.effect is None else str(action.effect),
        "applicability": action.applicability,
        "title": action.title,
        "command": action.command,
        "why": action.why,
        "frees_bytes": action.frees_bytes,
        "rule": action.rule,
        "cost": action.cost,
        "blocked_by": action.blocked_by,
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def _patch(patch: Patch) -> dict[str, Any]:
    row = {
        "setting": patch.setting,
        "from": patch.old,
        "to": patch.new,
        "effect": str(patch.effect),
        "as_flag": patch.as_flag,
        "as_kwarg": patch.as_kwarg,
        "as_env": patch.as_env,
        "reason": patch.reason,
        "predicted_freed_bytes": patch.predicted_freed_bytes,
        "applicable": patch.applicable,
        "blocked_by": patch.blocked_by,
        "permitted_by": patch.permitted_by,
        "predicts": patch.predicts,
        "tradeoff": patch.tradeoff,
        "rule": patch.rule,
        "group": patch.group,
    }
    answer: dict[str, Any] = plain_value(row)
    return answer


def _budget(budget: Budget) -> dict[str, Any]:
    parts = []
    for part in budget.parts:
        parts.append({"name": part.name, "bytes": part.bytes, "source": part.source})
    return {
        "device_total_bytes": budget.device_total_bytes,
        "parts": parts,
        "conflict": budget.conflict,
    }


def _evidence(evidence: tuple[Evidence, ...]) -> list[str]:
    return list(map(str, evidence))
