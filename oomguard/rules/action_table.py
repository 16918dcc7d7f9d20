"""Read the table of actions: their order by situation, and their wording.

The file is rules/actions.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomguard.core.facts import REGISTRY
from oomguard.core.incident import CAUSES, KINDS, PHASES, Incident
from oomguard.core.settings import SETTINGS, is_version_in
from oomguard.rules.expressions import Expression, suggestion, trusted_expression
from oomguard.rules.schema import Table
from oomguard.rules.signature import check_versions

DIRECTIONS: Final = ("up", "down", "on", "off")
# These actions are not settings: a person must do them outside of the failed program.
OUTSIDE: Final = (
    "end_other_process",
    "use_another_device",
    "wait_for_device",
    "smaller_checkpoint",
    "more_host_memory",
    "less_host_memory",
    "less_device_memory",
    "wrap_in_guard",
    "release_before_wake",
    "read_engine_error",
    "upgrade_engine",
    "gradient_checkpointing",
    "device_map",
    "image_size",
)


class Where(NamedTuple):
    """Select the failures of a row; an empty field fits every failure.

    No fact of ``unknown`` may be known, and the likeliest cause is none of ``except_causes``.
    ``versions`` is a range of the engine's versions; an unknown version is in none.
    """

    kinds: frozenset[str]
    causes: frozenset[str]
    frameworks: frozenset[str]
    phases: frozenset[str]
    when: tuple[Expression, ...]
    unknown: tuple[str, ...]
    except_causes: frozenset[str]
    versions: str

    def fits(self, incident: Incident) -> bool:
        """Return whether the row applies to this failure.

        Its likeliest cause counts, and each condition must be known to be true.
        """
        if incident.causes:
            cause = incident.causes[0].id
        else:
            cause = "unknown"
        found = (
            (self.kinds, incident.kind),
            (self.causes, cause),
            (self.frameworks, incident.framework),
            (self.phases, incident.phase),
        )
        if any(wanted and value not in wanted for wanted, value in found):
            return False
        if cause in self.except_causes:
            return False
        if self.versions and not is_version_in(self.versions, incident.framework_version):
            return False
        if any(name in incident.facts for name in self.unknown):
            return False
        return all(condition.evaluate(incident.facts) is True for condition in self.when)


class ActionWording(NamedTuple):
    """Hold the wording of one action for the failures of ``where``.

    ``titles``, ``whys`` and ``commands`` are templates. The first one whose facts are all known
    applies.
    """

    id: str
    direction: str | None
    where: Where
    titles: tuple[str, ...]
    whys: tuple[str, ...]
    commands: tuple[str, ...]


class Situation(NamedTuple):
    """Hold (action, direction) pairs for the failures of ``where``.

    They are the first actions in an expert's order, or actions that are never right.
    """

    where: Where
    actions: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class ActionTable:
    """Hold all situations, wordings and harmful actions; the first matching row applies."""

    situations: tuple[Situation, ...] = ()
    wordings: tuple[ActionWording, ...] = ()
    never: tuple[Situation, ...] = ()

    def __add__(self, other: ActionTable) -> ActionTable:
        """Return both tables as one; the rows of this one come first."""
        return ActionTable(
            self.situations + other.situations,
            self.wordings + other.wordings,
            self.never + other.never,
        )

    def fitting(self, incident: Incident) -> Iterator[Situation]:
        """Yield the situations of a failure; the first one that leads to an action applies."""
        return (row for row in self.situations if row.where.fits(incident))

    def is_harmful(self, name: str, direction: str | None, incident: Incident) -> bool:
        """Return whether an action would make a failure worse.

        A row without a direction covers every direction.
        """
        rows = (row for row in self.never if row.where.fits(incident))
        return any(
            name == other and way in {None, direction} for row in rows for other, way in row.actions
        )

    def wording(self, name: str, direction: str | None, incident: Incident) -> ActionWording | None:
        """Return the wording of an action for a failure, or None.

        A row without a direction covers every direction.
        """
        for row in self.wordings:
            if row.id == name and row.direction in {None, direction} and row.where.fits(incident):
                return row
        return None


def read_actions(raw: dict[str, Any], path: Path, make: Callable[..., Expression]) -> ActionTable:
    """Read the table of actions.

    Args:
        raw: the file's tables.
        path: the file, for messages.
        make: turns a text into an expression.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "actions_file")
    checked = make is not trusted_expression  # a test checks the shipped file
    situations, never = (
        tuple(
            Situation(
                _where(row, path, make, checked=checked),
                tuple(_split(label, row, checked) for label in row.get(key)),
            )
            for row in table.tables(name, name)
        )
        for name, key in (("situation", "first"), ("never", "actions"))
    )
    wordings = []
    for row in table.tables("wording", "action wording"):
        name, direction = _split(row.get("action"), row, checked)
        texts = (tuple(row.get(key, ())) for key in ("title", "why", "command"))
        wordings.append(
            ActionWording(name, direction, _where(row, path, make, checked=checked), *texts)
        )
    return ActionTable(situations, tuple(wordings), never)


def _where(row: Table, path: Path, make: Callable[..., Expression], *, checked: bool) -> Where:
    if checked:
        row.choices("kinds", KINDS, "kind")
        row.choices("causes", CAUSES, "cause")
        row.choices("except_causes", CAUSES, "cause")
        row.choices("phases", PHASES, "phase")
        check_versions(row.get("versions", ""), row)
    return Where(
        kinds=frozenset(row.get("kinds", ())),
        causes=frozenset(row.get("causes", ())),
        frameworks=frozenset(row.get("frameworks", ())),
        phases=frozenset(row.get("phases", ())),
        when=row.expressions("when", make),
        unknown=tuple(row.choices("unknown", REGISTRY, "fact"))
        if checked
        else tuple(row.get("unknown", ())),
        except_causes=frozenset(row.get("except_causes", ())),
        versions=row.get("versions", ""),
    )


def _split(label: str, row: Table, checked: bool) -> tuple[str, str | None]:
    """Split ``gpu_memory_utilization down`` into action and direction.

    Raises:
        RuleError: one of them is unknown.
    """
    name, _, direction = label.partition(" ")
    if checked and name not in SETTINGS and name not in OUTSIDE:
        raise row.error(f"unknown action {name!r}", hint=suggestion(name, (*SETTINGS, *OUTSIDE)))
    if checked and direction and direction not in DIRECTIONS:
        raise row.error(f"unknown direction {direction!r}", hint=f"one of {', '.join(DIRECTIONS)}")
    return name, direction or None
