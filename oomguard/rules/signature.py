"""Read signatures: the messages of engines before and at a failure; one file per message.

A file of quotations describes texts that only quote an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from oomguard.core.facts import REGISTRY, is_of_type
from oomguard.core.incident import KINDS, PHASES
from oomguard.rules.expressions import suggestion
from oomguard.rules.pattern import LazyPattern
from oomguard.rules.schema import Table

# How a line may say that an engine ended; scan/engine_errors.py has the meaning of each.
ENDS: Final = ("died", "failing", "gone", "stopping", "told")
_QUOTATION_PARTS: Final = ("line", "before", "lead", "around", "raw", "above", "below", "page")


class Wording(NamedTuple):
    """Describe one wording of a message: a literal anchor, and a pattern whose groups are facts.

    A ``near`` wording describes only the failure next to it (a traceback's frame); any other
    describes everything that follows. ``starts`` marks an engine's start. A wording may have its
    own kind or framework, because one allocator prints for several devices. ``key`` is the
    pattern's position in its file. ``ends`` is how the line reports the end of its engine; ``role``
    is the only kind of process whose line counts.
    """

    anchor: str
    pattern: Any
    source: str
    versions: str | None = None
    facts: Mapping[str, Any] = MappingProxyType({})
    phase: str | None = None
    near: bool = False
    starts: bool = False
    framework: str | None = None
    kind: str | None = None
    key: str = ""
    ends: str | None = None
    role: str | None = None


class Quotation(NamedTuple):
    """Describe a text that quotes an error without reporting one.

    ``part`` is the text to search:

    - ``line``: the line without its prefix.
    - ``before``: the part of it before the message's own words.
    - ``lead``: the part before the exception's name.
    - ``around``: the line with a null character instead of the message.
    - ``raw``: the line as printed.
    - ``above`` and ``below``: the lines before or after it.
    - ``page``: all of these as printed, with a null character before and after the line.

    A message with ``below_facts`` numbers or more is always a report.
    """

    name: str
    pattern: Any
    part: str
    quoted: tuple[str, ...]
    real: tuple[str, ...]
    below_facts: int = 1000


class Signature(NamedTuple):
    """Describe a printed message: a failure of one kind, or a line with facts (``kind`` is None).

    ``clauses`` are parts of the message that depend on version and platform. Each is searched
    separately after the wording. ``wraps`` lists kinds that this message only passes on; it takes
    over their facts. ``becomes`` maps a phase to the kind that the same words have in it.
    """

    path: str
    kind: str | None
    framework: str
    phase: str
    wordings: tuple[Wording, ...]
    tests: tuple[Mapping[str, Any], ...]
    clauses: tuple[Any, ...] = ()
    wraps: tuple[str, ...] = ()
    becomes: Mapping[str, str] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Return framework and file name, the signature's name in outputs."""
        return f"{self.framework}/{Path(self.path).stem}"


def read_signature(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> Signature:
    """Read one signature file; ``make`` turns a pattern's text into a pattern.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "signature")
    context = bool(table.get("context", False))
    if context == ("kind" in raw):
        raise table.error("give exactly one of kind and context = true", "kind")
    return Signature(
        path=str(path),
        kind=None if context else table.choice("kind", KINDS),
        framework=table.get("framework"),
        phase=table.choice("phase", PHASES, "unknown"),
        wordings=tuple(
            w for row in table.tables("wording", "wording") for w in _wordings(row, path, make)
        ),
        tests=_tests(table, make),
        clauses=tuple(_pattern(row, path, make) for row in table.tables("clause", "clause")),
        wraps=_wraps(table),
        becomes=_becomes(table),
    )


def _tests(table: Table, make: Callable[..., Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the file's own tests; for a shipped file they are checked when they run."""
    if make is LazyPattern:
        return tuple(table.get("test", ()))
    return tuple(test.values for test in table.tables("test", "signature test"))


def read_quotations(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> list[Quotation]:
    """Read a file of quotations; ``make`` as in ``read_signature``.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "quotations")
    return [
        Quotation(
            name=row.get("name"),
            pattern=_pattern(row, path, make),
            part=row.choice("part", _QUOTATION_PARTS),
            quoted=tuple(row.get("quoted")),
            real=tuple(row.get("real", ())),
            below_facts=row.get("below_facts", 1000),
        )
        for row in table.tables("quotation", "quotation")
    ]


def _pattern(row: Table, path: Path, make: Callable[..., Any]) -> Any:
    return make(row.get("pattern"), path=str(path), key=f"{row.key}.pattern")


def _wordings(row: Table, path: Path, make: Callable[..., Any]) -> Iterable[Wording]:
    """Yield one wording for each anchor of the row; all share its pattern."""
    pattern = _pattern(row, path, make)
    anchors = _anchors(row)
    facts = row.get("facts", {})
    for name, value in facts.items():
        if name not in REGISTRY:
            raise row.error(f"unknown fact {name!r}", name, hint=suggestion(name, REGISTRY))
        if not is_of_type(name, value):
            raise row.error(f"{name} is {REGISTRY[name].type}, not {value!r}", name)
    versions = row.get("versions")
    if versions is not None and make is not LazyPattern:
        check_versions(versions, row)
    shared = {
        "pattern": pattern,
        "source": row.get("source"),
        "versions": versions,
        "facts": facts,
        "phase": row.choice("phase", PHASES) if row.get("phase") else None,
        "near": bool(row.get("near", False)),
        "starts": bool(row.get("starts", False)),
        "framework": row.get("framework"),
        "kind": row.choice("kind", KINDS) if row.get("kind") else None,
        "ends": row.choice("ends", ENDS) if row.get("ends") else None,
        "role": row.get("role"),
        "key": f"{row.key}.pattern",
    }
    for anchor in anchors:
        yield Wording(anchor=anchor, **shared)


def _anchors(row: Table) -> list[str]:
    """Return the literals of a row; every match contains one of them."""
    if ("anchor" in row.values) == ("anchors" in row.values):
        raise row.error("give exactly one of anchor and anchors")
    if "anchors" in row.values:
        name = "anchors"
    else:
        name = "anchor"
    anchors = row.get("anchors", [row.get("anchor")])
    for anchor in anchors:
        if not isinstance(anchor, str) or not anchor.strip() or "\n" in anchor:
            raise row.error("an anchor must be a non-empty literal on one line", name)
    return list(anchors)


def check_versions(versions: str, row: Table) -> None:
    """Raise RuleError if ``versions`` is no range of versions (PEP 440)."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise row.error(
            f"not a version range: {versions!r}", "versions", hint='write it as ">=0.8,<0.20"'
        ) from None


def _wraps(table: Table) -> tuple[str, ...]:
    for kind in table.get("wraps", ()):
        if kind not in KINDS:
            raise table.error(f"{kind!r} is not a kind", "wraps")
    return tuple(table.get("wraps", ()))


def _becomes(table: Table) -> Mapping[str, str]:
    becomes = dict(table.get("becomes", {}))
    for phase, kind in becomes.items():
        if phase not in PHASES or kind not in KINDS:
            if phase not in PHASES:
                wrong = f"{phase!r} is not a phase"
            else:
                wrong = f"{kind!r} is not a kind"
            raise table.error(wrong, "becomes")
    return becomes
