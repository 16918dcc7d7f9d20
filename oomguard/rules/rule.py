"""Rules: why memory ran out and what to do about it; one file a rule, read to frozen records."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from oomguard.facts import REGISTRY
from oomguard.incident import CAUSES
from oomguard.kinds import KINDS
from oomguard.rules.expressions import Expression, suggestion, trusted_expression
from oomguard.rules.fix import Fix, read_fix
from oomguard.rules.table import Table
from oomguard.templates import PLACEHOLDER

_STATUSES: Final = ("experimental", "stable", "deprecated")
_CODE: Final = re.compile(r"[A-Z]{2,8}\d{3}")


@dataclass(frozen=True, slots=True)
class Confidence:
    """One step of a rule's confidence: ``base`` sets it, ``add`` changes it where ``when`` holds."""

    base: float | None
    add: float
    when: Expression | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Why memory ran out and what to do: conditions over facts, explanation, fixes and the rule's own tests."""

    path: str
    code: str
    cause: str
    title: str
    since: str
    status: str
    kinds: tuple[str, ...]
    when: tuple[Expression, ...]
    unknown: tuple[str, ...]
    confidence: tuple[Confidence, ...]
    summary: str
    why: str
    confirm: str
    fixes: tuple[Fix, ...]
    references: tuple[Mapping[str, Any], ...]
    tests: tuple[Mapping[str, Any], ...]


def read_rule(raw: dict[str, Any], path: Path, make: Callable[..., Expression]) -> Rule:
    """Read one rule file; ``make`` turns a text into an expression. Raises RuleError for a mistake in it."""
    table = Table(raw, path, "", "rule")
    if not _CODE.fullmatch(table.get("code")):
        raise table.error("a code is two to eight capitals and three digits, OG201 for example", "code")
    table.choice("status", _STATUSES)
    kinds, unknown = table.choices("kinds", KINDS, "kind"), table.choices("unknown", REGISTRY, "fact")
    confidence = _confidence(table, path, make)
    explain = _explain(table, path, make)
    return Rule(
        path=str(path),
        code=table.get("code"),
        cause=table.choice("cause", CAUSES),
        title=table.get("title"),
        since=table.get("since"),
        status=table.get("status"),
        kinds=kinds,
        when=table.expressions("when", make),
        unknown=unknown,
        confidence=confidence,
        summary=explain.get("summary"),
        why=explain.get("why"),
        confirm=explain.get("confirm"),
        fixes=tuple(read_fix(row, path, make) for row in table.tables("fix", "fix")),
        references=_shown(table, "reference", "reference", make),
        tests=_shown(table, "test", "rule test", make),
    )


def _shown(table: Table, name: str, schema: str, make: Callable[..., Expression]) -> tuple[Mapping[str, Any], ...]:
    """Return rows that decide nothing; those of a shipped rule are checked where they are used, not at each start."""
    if make is trusted_expression:
        return tuple(table.get(name, ()))
    return tuple(row.values for row in table.tables(name, schema))


def _confidence(table: Table, path: Path, make: Callable[..., Expression]) -> tuple[Confidence, ...]:
    steps = []
    for row in table.tables("confidence", "confidence"):
        if ("base" in row.values) == ("add" in row.values):
            raise row.error("exactly one of base and add")
        name = "base" if "base" in row.values else "add"
        if not -1 <= row.get(name) <= 1:
            raise row.error("a confidence is between 0 and 1", name)
        when = row.get("when")
        condition = make(when, path=str(path), key=f"{row.key}.when") if when is not None else None
        steps.append(Confidence(row.get("base"), float(row.get("add", 0.0)), condition))
    if not steps or steps[0].base is None:
        raise table.error("the first step of confidence is a base", "confidence")
    return tuple(steps)


def _explain(table: Table, path: Path, make: Callable[..., Expression]) -> Table:
    """Return the rule's texts, whose placeholders all name facts; those of a shipped rule are checked by its tests."""
    explain = Table(table.get("explain"), path, "explain", "explain")
    if make is trusted_expression:
        return explain
    for name in ("summary", "why", "confirm"):
        for fact in (fact for names, _ in PLACEHOLDER.findall(explain.get(name)) for fact in names.split("|")):
            if fact not in REGISTRY:
                raise explain.error(f"unknown fact {fact!r}", name, hint=suggestion(fact, REGISTRY))
    return explain
