"""The file of what is missing: which one thing would decide a failure, by its kind, engine, phase and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomguard.facts import REGISTRY
from oomguard.incident import Incident
from oomguard.kinds import KINDS
from oomguard.missing import Missing
from oomguard.rules.table import Table


@dataclass(frozen=True, slots=True)
class MissingRow:
    """One thing that may be missing; an empty ``kinds``, ``frameworks`` or ``phases`` fits every one.

    Attributes:
        unknown: facts of which none may be known.
        of_a_log: whether it may be missing of a log only; what failed here just now was heard whole.
    """

    kinds: frozenset[str]
    frameworks: frozenset[str]
    phases: frozenset[str]
    unknown: tuple[str, ...]
    missing: Missing
    of_a_log: bool = False

    def fits(self, incident: Incident, *, heard: bool) -> bool:
        """Return whether this is what would decide the incident; ``heard`` says that it failed here, just now."""
        if heard and self.of_a_log:
            return False
        told = ((self.kinds, incident.kind), (self.frameworks, incident.framework), (self.phases, incident.phase))
        if any(wanted and value not in wanted for wanted, value in told):
            return False
        return not any(name in incident.facts for name in self.unknown)


def read_missing(raw: dict[str, Any], path: Path) -> list[MissingRow]:
    """Read the file. Raises RuleError for a mistake in it."""
    table = Table(raw, path, "", "missing_file")
    return [
        MissingRow(
            kinds=frozenset(row.choices("kinds", KINDS, "kind")),
            frameworks=frozenset(row.get("frameworks", [])),
            phases=frozenset(row.get("phases", [])),
            unknown=tuple(row.choices("unknown", REGISTRY, "fact")),
            missing=Missing(row.get("what"), row.get("command")),
            of_a_log=row.get("of_a_log", False),
        )
        for row in table.tables("missing", "missing")
    ]


def what_is_missing(incident: Incident, rows: tuple[MissingRow, ...], *, heard: bool) -> Missing | None:
    """Return what would decide an incident whose first cause is unknown, None for any other or where no row fits.

    Args:
        incident: a failure with its causes.
        rows: the rows in force, the first that fits counts.
        heard: whether it failed here, just now, and not in a log that may be a part.
    """
    if incident.causes and incident.causes[0].id != "unknown":
        return None
    return next((row.missing for row in rows if row.fits(incident, heard=heard)), None)
