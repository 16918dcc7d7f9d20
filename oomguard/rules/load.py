"""Reading rule files: TOML to frozen records, every mistake told with file, key path, line and "did you mean"."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.errors import RuleError
from oomguard.facts import PLACEHOLDER, REGISTRY, is_of_type
from oomguard.incident import CAUSES, KINDS, PHASES, Effect
from oomguard.rules.expressions import Expression, compile_expression, suggestion
from oomguard.rules.lazy import LazyPattern
from oomguard.rules.parsed import read_tables
from oomguard.rules.pattern import compile_pattern
from oomguard.rules.table import Table, read_toml

_STATUSES: Final = ("experimental", "stable", "deprecated")


@dataclass(frozen=True, slots=True)
class Wording:
    """One wording of a message: a literal that the scanner looks for, then a pattern with the facts as groups.

    ``key`` says where in its file the pattern is written.
    """

    anchor: str
    pattern: Any
    source: str
    versions: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    phase: str | None = None
    near: bool = False
    starts: bool = False
    framework: str | None = None
    kind: str | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Quotation:
    """How a text shows that it quotes an error and does not report one.

    ``part`` is where the pattern is looked for: ``line`` the peeled line, ``before`` what stands on it before the
    message's own words, ``lead`` what stands before the exception's name, ``around`` the line with a null character
    in the message's place, ``raw`` the line as it was printed, ``above`` the lines before it. A message with
    ``below_facts`` figures or more is a report whatever stands around it.
    """

    name: str
    pattern: Any
    part: str
    quoted: tuple[str, ...]
    real: tuple[str, ...]
    below_facts: int = 1000


@dataclass(frozen=True, slots=True)
class Signature:
    """What was printed: one kind, or (``context``) a line that is no failure and only carries facts.

    ``clauses`` are parts of the message that come and go with version and platform, each read by itself wherever it
    stands behind the wording. ``wraps`` names kinds that this message only passes on: it takes over their facts.
    ``becomes`` names the kind that the same words have in another phase. A ``near`` wording speaks of the failure
    beside it only (a traceback's frame), any other of all that follows; ``starts`` marks an engine's start. A wording
    may have a kind or a framework of its own: one allocator prints for several devices.
    """

    path: str
    kind: str | None
    framework: str
    phase: str
    wordings: tuple[Wording, ...]
    tests: tuple[Mapping[str, Any], ...]
    clauses: tuple[Any, ...] = ()
    wraps: tuple[str, ...] = ()
    becomes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Framework and file name, the way the terminal and the evidence name a signature."""
        return f"{self.framework}/{Path(self.path).stem}"


@dataclass(frozen=True, slots=True)
class Confidence:
    """One step of a rule's confidence: ``base`` sets it, ``add`` changes it where ``when`` holds."""

    base: float | None
    add: float
    when: Expression | None


@dataclass(frozen=True, slots=True)
class Fix:
    """One setting to change: solved by a named solver of the planner or by a CEL value.

    A fix that no log can give a value for says what it acts on (``lever``) and which figure is ``missing``.
    """

    setting: str
    effect: Effect
    solve: str | None
    value: Expression | None
    when: tuple[Expression, ...]
    tradeoff: str
    alternative: bool
    lever: str
    missing: str


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


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All signatures and rules in force."""

    signatures: tuple[Signature, ...]
    rules: tuple[Rule, ...]
    quotations: tuple[Quotation, ...] = ()

    @property
    def anchors(self) -> tuple[str, ...]:
        """The anchors of all signatures, each once, sorted."""
        return tuple(sorted({wording.anchor for signature in self.signatures for wording in signature.wordings}))

    def rule(self, code: str) -> Rule:
        """The rule with this code; raises KeyError where there is none."""
        return {rule.code: rule for rule in self.rules}[code]


def shipped_root() -> Path:
    """The folder of the rules that come with oomguard: inside the wheel, or at the top of a source checkout."""
    inside = Path(__file__).with_name("shipped")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "rules"


def load_rules(extra: Iterable[Path] = (), *, check: bool = False) -> RuleSet:
    """The shipped rules, then the user's folders: a rule adds, or overrides ours by its code; a signature adds.

    Shipped patterns are compiled on first use; with ``check`` all of them at once, as the user's always are. Raises
    RuleError for the first file that cannot be used.
    """
    signatures: list[Signature] = []
    rules: dict[str, Rule] = {}
    quotations: list[Quotation] = []
    shipped = shipped_root()
    for root in (shipped, *extra):
        make = compile_pattern if check or root != shipped else LazyPattern
        if not _is_folder(root):
            raise RuleError("no such folder of rules", path=str(root), hint="--rules takes a folder of .toml files")
        seen: dict[str, str] = {}
        lazy = make is LazyPattern
        tables = read_tables(root) if lazy else {path: read_toml(path) for path in sorted(root.rglob("*.toml"))}
        for path, table in tables.items():
            if "cause" in table or "code" in table:
                rule = _rule(table, path)
                if rule.code in seen:
                    raise RuleError(f"code {rule.code} is taken by {seen[rule.code]}", path=str(path), key="code")
                seen[rule.code] = path.name
                rules[rule.code] = rule
            elif "quotation" in table:
                quotations += _quotations(table, path, make)
            else:
                signatures.append(_signature(table, path, make))
    return RuleSet(tuple(signatures), tuple(rules[code] for code in sorted(rules)), tuple(quotations))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name too long, or a null byte
        return False


def _signature(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> Signature:
    table = Table(raw, path, "", "signature")
    context = bool(table.get("context", False))
    if context == ("kind" in raw):
        raise table.error("exactly one of kind and context = true says what the file is", "kind")
    kind = None if context else table.choice("kind", KINDS)
    phase = table.choice("phase", PHASES, "unknown")
    wordings = []
    for i, row in enumerate(table.tables("wording", "wording")):
        key = f"wording[{i}].pattern"
        pattern = make(row.get("pattern"), path=str(path), key=key)
        anchors = _anchors(row)
        for name, value in row.get("facts", {}).items():
            if name not in REGISTRY:
                raise row.error(f"unknown fact {name!r}", name, hint=suggestion(name, REGISTRY))
            if not is_of_type(name, value):
                raise row.error(f"{name} is {REGISTRY[name].type}, not {value!r}", name)
        versions = row.get("versions")
        if versions is not None and make is not LazyPattern:
            _check_versions(versions, row)
        own_phase = row.choice("phase", PHASES) if row.get("phase") else None
        wordings += [
            Wording(
                anchor, pattern, row.get("source"), versions, row.get("facts", {}), own_phase,
                bool(row.get("near", False)), bool(row.get("starts", False)), row.get("framework"),
                row.choice("kind", KINDS) if row.get("kind") else None, key,
            )
            for anchor in anchors
        ]  # fmt: skip
    clauses = tuple(
        make(row.get("pattern"), path=str(path), key=f"{row.key}.pattern") for row in table.tables("clause", "clause")
    )
    tests = tuple(t.values for t in table.tables("test", "signature test"))
    wraps, becomes = tuple(table.get("wraps", ())), dict(table.get("becomes", {}))
    for name, known in [
        *((k, KINDS) for k in wraps),
        *((k, PHASES) for k in becomes),
        *((k, KINDS) for k in becomes.values()),
    ]:
        if name not in known:
            raise table.error(f"{name!r} is neither a kind nor a phase", "wraps" if name in wraps else "becomes")
    return Signature(str(path), kind, table.get("framework"), phase, tuple(wordings), tests, clauses, wraps, becomes)


def _quotations(raw: dict[str, Any], path: Path, make: Callable[..., Any]) -> list[Quotation]:
    found = []
    for row in Table(raw, path, "", "quotations").tables("quotation", "quotation"):
        pattern = make(row.get("pattern"), path=str(path), key=f"{row.key}.pattern")
        part = row.choice("part", ("line", "before", "lead", "around", "raw", "above"))
        found.append(
            Quotation(
                row.get("name"),
                pattern,
                part,
                tuple(row.get("quoted")),
                tuple(row.get("real", ())),
                row.get("below_facts", 1000),
            )
        )
    return found


def _anchors(row: Table) -> list[str]:
    """The literals of which every match holds one: ``anchor``, or ``anchors`` where there are several."""
    if ("anchor" in row.values) == ("anchors" in row.values):
        raise row.error("exactly one of anchor and anchors")
    anchors = row.get("anchors", [row.get("anchor")])
    for anchor in anchors:
        if not isinstance(anchor, str) or not anchor.strip() or "\n" in anchor:
            raise row.error(
                "an anchor is a non-empty literal on one line", "anchors" if "anchors" in row.values else "anchor"
            )
    return list(anchors)


def _check_versions(versions: str, row: Table) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise row.error(f"not a version range: {versions!r}", "versions", hint='write it as ">=0.8,<0.20"') from None


def _rule(raw: dict[str, Any], path: Path) -> Rule:
    table = Table(raw, path, "", "rule")
    if not re.fullmatch(r"[A-Z]{2,8}\d{3}", table.get("code")):
        raise table.error("a code is two to eight capitals and three digits, OG201 for example", "code")
    table.choice("status", _STATUSES)
    for kind in table.get("kinds"):
        if kind not in KINDS:
            raise table.error(f"unknown kind {kind!r}", "kinds", hint=suggestion(str(kind), KINDS))
    for name in table.get("unknown", []):
        if not isinstance(name, str) or name not in REGISTRY:
            raise table.error(f"unknown fact {name!r}", "unknown", hint=suggestion(str(name), REGISTRY))
    confidence = []
    for row in table.tables("confidence", "confidence"):
        if ("base" in row.values) == ("add" in row.values):
            raise row.error("exactly one of base and add")
        if not -1 <= (row.get("base") if "base" in row.values else row.get("add")) <= 1:
            raise row.error("a confidence is between 0 and 1", "base" if "base" in row.values else "add")
        when = row.get("when")
        condition = compile_expression(when, path=str(path), key=f"{row.key}.when") if when is not None else None
        confidence.append(Confidence(row.get("base"), float(row.get("add", 0.0)), condition))
    if not confidence or confidence[0].base is None:
        raise table.error("the first step of confidence is a base", "confidence")
    explain = Table(table.get("explain"), path, "explain", "explain")
    for name in ("summary", "why", "confirm"):
        for fact in (fact for names, _ in PLACEHOLDER.findall(explain.get(name)) for fact in names.split("|")):
            if fact not in REGISTRY:
                raise explain.error(f"unknown fact {fact!r}", name, hint=suggestion(fact, REGISTRY))
    return Rule(
        path=str(path), code=table.get("code"), cause=table.choice("cause", CAUSES), title=table.get("title"),
        since=table.get("since"), status=table.get("status"), kinds=tuple(table.get("kinds")),
        when=table.expressions("when"), unknown=tuple(table.get("unknown", ())), confidence=tuple(confidence),
        summary=explain.get("summary"),
        why=explain.get("why"), confirm=explain.get("confirm"),
        fixes=tuple(_fix(row, path) for row in table.tables("fix", "fix")),
        references=tuple(r.values for r in table.tables("reference", "reference")),
        tests=tuple(t.values for t in table.tables("test", "rule test")),
    )  # fmt: skip


def _fix(row: Table, path: Path) -> Fix:
    effect = row.choice("effect", [str(effect) for effect in Effect])
    if sum(name in row.values for name in ("solve", "value", "lever")) != 1:
        raise row.error("exactly one of solve, value and lever")
    if not row.get("value", "x").strip():
        raise row.error("the value is empty", "value")
    if ("lever" in row.values) != ("missing" in row.values):
        raise row.error("lever and missing come together")
    value = row.get("value")
    return Fix(
        setting=row.get("setting"), effect=Effect.parse(effect), solve=row.get("solve"),
        value=compile_expression(value, path=str(path), key=f"{row.key}.value", result=None) if value else None,
        when=row.expressions("when"), tradeoff=row.get("tradeoff", ""), alternative=bool(row.get("alternative", False)),
        lever=row.get("lever", ""), missing=row.get("missing", ""),
    )  # fmt: skip
