"""What spans and their events carry of attempts and incidents; the names stand in spans.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomguard.facts import FactValue
from oomguard.incident import Attempt, Incident

Attributes = dict[str, FactValue]
RUN: Final = "oomguard.run"
ATTEMPT: Final = "oomguard.attempt"
CALL: Final = "oomguard.call"
INCIDENT: Final = "oomguard.incident"
_FILE: Final = Path(__file__).with_name("spans.toml")


@functools.cache
def table() -> Mapping[str, Any]:
    """Return the names of spans, events and attributes, and the exporters."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def of_incident(incident: Incident, number: int) -> Attributes:
    """Return the attributes of an incident's event: its numbers, and no text of the user's but the headline, masked."""
    from oomguard.report.presentable import drawn

    found: Attributes = {
        "oomguard.attempt.number": number,
        "oomguard.incident.kind": incident.kind,
        "oomguard.incident.is_oom": incident.is_oom,
        "oomguard.incident.headline": drawn(incident.headline),
        "oomguard.incident.phase": incident.phase,
        "oomguard.incident.framework": incident.framework,
    }
    for cause in incident.causes[:1]:
        found["oomguard.incident.cause"] = cause.id
        found["oomguard.incident.rule"] = cause.rule
        found["oomguard.incident.confidence"] = cause.confidence
    facts = {f"oomguard.fact.{name}": fact.value for name, fact in sorted(incident.facts.items())}
    return found | {name: value for name, value in facts.items() if not isinstance(value, str)}


def of_attempt(attempt: Attempt) -> Attributes:
    """Return the attributes of an attempt's span."""
    found: Attributes = {"oomguard.attempt.number": attempt.number, **of_settings(attempt)}
    if attempt.exit_status is not None:
        found["process.exit.code"] = attempt.exit_status
    predicted = {name: value for patch in attempt.patches for name, value in patch.predicts.items()}
    found |= {f"oomguard.predicted.{name}": value for name, value in predicted.items()}
    return found | {f"oomguard.measured.{name}": value for name, value in attempt.measured.items()}


def of_settings(attempt: Attempt) -> Attributes:
    """Return what oomguard had changed in an attempt."""
    return {f"oomguard.setting.{name}": value for name, value in attempt.settings.items()}
