"""The JSON contract, schema 1: one object per input; keys may be added, never renamed."""

from __future__ import annotations

import json
from typing import Any, Final

from oomguard.incident import Diagnosis, Incident, Patch
from oomguard.report.mask import mask

SCHEMA: Final = 1


def to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as the contract's object; texts are masked, ``source`` is exactly as it was given."""
    return {
        "schema": SCHEMA,
        "source": diagnosis.source,
        "verdict": diagnosis.verdict,
        "incidents": [incident_dict(incident) for incident in diagnosis.incidents],
        **({"notes": list(diagnosis.notes)} if diagnosis.notes else {}),
    }


def incident_dict(incident: Incident) -> dict[str, Any]:
    """One incident as the contract's object."""
    return {
        "kind": incident.kind,
        "is_oom": incident.is_oom,
        "framework": incident.framework,
        "framework_version": incident.framework_version,
        "phase": incident.phase,
        "message": mask(incident.message),
        "location": {"line": incident.location.line, "byte": incident.location.byte, "process": incident.location.process},
        "repeated": incident.repeated,
        "facts": {name: mask(f.value) if isinstance(f.value, str) else f.value for name, f in sorted(incident.facts.items())},
        "causes": [
            {
                "id": cause.id, "rule": cause.rule, "confidence": cause.confidence,
                "evidence": [mask(str(e)) for e in cause.evidence], "explanation": mask(cause.explanation), "title": cause.title,
            }
            for cause in incident.causes
        ],
        "plan": [patch_dict(patch) for patch in incident.plan],
        "budget": {
            "device_total_bytes": incident.budget.device_total_bytes,
            "parts": [{"name": p.name, "bytes": p.bytes, "source": p.source} for p in incident.budget.parts],
        },
        "alternatives": [
            {"setting": a.setting, "to": a.new, "why_not": a.why_not, "as_flag": a.as_flag, "as_kwarg": a.as_kwarg}
            for a in incident.alternatives
        ],
        "unknown": list(incident.unknown),
    }  # fmt: skip


def patch_dict(patch: Patch) -> dict[str, Any]:
    """One patch as the contract's object."""
    return {
        "setting": patch.setting, "from": patch.old, "to": patch.new, "effect": str(patch.effect),
        "as_flag": patch.as_flag, "as_kwarg": patch.as_kwarg, "as_env": patch.as_env, "reason": patch.reason,
        "predicted_freed_bytes": patch.predicted_freed_bytes, "applicable": patch.applicable,
        "blocked_by": patch.blocked_by, "predicts": dict(patch.predicts), "tradeoff": patch.tradeoff, "rule": patch.rule,
    }  # fmt: skip


def to_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as one line of JSON."""
    return json.dumps(to_dict(diagnosis), ensure_ascii=False, allow_nan=False)
