"""Reading rule files: TOML to frozen records, every mistake told with file, key path, line and "did you mean"."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from oomguard.errors import RuleError, SettingError
from oomguard.facts import PLACEHOLDER, REGISTRY, Fact, coerce
from oomguard.incident import CAUSES, KINDS, PHASES, Effect
from oomguard.rules.expressions import Expression, compile_expression, suggestion

SCHEMA: Final = 1
MAX_FILE_BYTES: Final = 1 << 20
MAX_PATTERN_CHARS: Final = 4000
_STATUSES: Final = ("experimental", "stable", "deprecated")

# Key -> (type, required). Nested tables have their own line; anything not named here is an error.
_KEYS: Final[dict[str, dict[str, tuple[type | tuple[type, ...], bool]]]] = {
    "signature": {
        "schema": (int, True), "kind": (str, False), "context": (bool, False), "framework": (str, True),
        "phase": (str, False), "wording": (list, True), "test": (list, True),
    },
    "wording": {
        "anchor": (str, True), "pattern": (str, True), "versions": (str, False), "source": (str, True),
        "facts": (dict, False), "phase": (str, False),
    },
    "signature test": {"log": (str, True), "expect": (dict, False), "expect_no_match": (bool, False)},
    "rule": {
        "schema": (int, True), "code": (str, True), "cause": (str, True), "title": (str, True), "since": (str, True),
        "status": (str, True), "kinds": (list, True), "when": (list, True), "unknown": (list, False), "confidence": (list, True),
        "explain": (dict, True), "fix": (list, False), "reference": (list, True), "test": (list, True),
    },
    "confidence": {"base": ((int, float), False), "add": ((int, float), False), "when": (str, False)},
    "explain": {"summary": (str, True), "why": (str, True), "confirm": (str, True)},
    "fix": {
        "setting": (str, True), "effect": (str, True), "solve": (str, False), "value": (str, False),
        "when": (list, False), "tradeoff": (str, False), "alternative": (bool, False), "lever": (str, False),
        "missing": (str, False),
    },
    "reference": {"note": (str, True), "url": (str, False)},
    "rule test": {"kind": (str, True), "facts": (dict, True), "gives": (dict, False), "expect": (dict, False),
                  "expect_no_match": (bool, False)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wording:
    """One wording of a message: a literal that the scanner looks for, then a pattern with the facts as groups."""

    anchor: str
    pattern: Any
    source: str
    versions: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    phase: str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """What was printed: one kind, or (``context``) a line that is no failure and only carries facts."""

    path: str
    kind: str | None
    framework: str
    phase: str
    wordings: tuple[Wording, ...]
    tests: tuple[Mapping[str, Any], ...]

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

    def rule(self, code: str) -> Rule:
        """The rule with this code; raises KeyError where there is none."""
        return {rule.code: rule for rule in self.rules}[code]


def shipped_root() -> Path:
    """The folder of the rules that come with oomguard: inside the wheel, or at the top of a source checkout."""
    inside = Path(__file__).with_name("shipped")
    return inside if inside.is_dir() else Path(__file__).parents[2] / "rules"


def load_rules(extra: Iterable[Path] = ()) -> RuleSet:
    """The shipped rules, then the user's folders: a rule adds, or overrides ours by its code; a signature adds.

    Raises RuleError for the first file that cannot be used.
    """
    signatures: list[Signature] = []
    rules: dict[str, Rule] = {}
    for root in (shipped_root(), *extra):
        if not root.is_dir():
            raise RuleError("no such folder of rules", path=str(root), hint="--rules takes a folder of .toml files")
        seen: dict[str, str] = {}
        for path in sorted(root.rglob("*.toml")):
            table = _read(path)
            if "cause" in table or "code" in table:
                rule = _rule(table, path)
                if rule.code in seen:
                    raise RuleError(f"code {rule.code} is taken by {seen[rule.code]}", path=str(path), key="code")
                seen[rule.code] = path.name
                rules[rule.code] = rule
            else:
                signatures.append(_signature(table, path))
    return RuleSet(tuple(signatures), tuple(rules[code] for code in sorted(rules)))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RuleError(f"larger than {MAX_FILE_BYTES} bytes", path=str(path))
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RuleError(f"cannot be read: {error.strerror}", path=str(path)) from None
    except UnicodeDecodeError:
        raise RuleError("not UTF-8", path=str(path)) from None
    except RecursionError:
        raise RuleError("nested too deeply", path=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(where.group(1)), int(where.group(2))) if where else (None, None)
        message = re.sub(r" \(at .*\)$", "", str(error))
        raise RuleError(f"not TOML: {message}", path=str(path), line=line, column=column) from None


class _Table:
    """One table of a file, checked against its keys on construction; knows how to name its own mistakes."""

    def __init__(self, value: Any, path: Path, key: str, schema: str) -> None:
        self.path, self.key = path, key
        known = _KEYS[schema]
        if not isinstance(value, dict):
            raise self.error(f"expected a table, found {type(value).__name__}")
        self.values: dict[str, Any] = value
        for name, entry in value.items():
            if name not in known:
                raise self.error(f"unknown key {name!r}", name, hint=suggestion(name, known))
            expected = known[name][0]
            # bool is an int to Python and not to the author of a rule
            if not isinstance(entry, expected) or (isinstance(entry, bool) and expected is not bool):
                wanted = expected if isinstance(expected, type) else expected[-1]
                raise self.error(f"expected {wanted.__name__}, found {type(entry).__name__}", name)
        for name, (_, required) in known.items():
            if required and name not in value:
                raise self.error(f"the key {name!r} is missing")
        if value.get("schema", SCHEMA) != SCHEMA:
            raise self.error(f"schema {value['schema']} is not known to this version, which reads {SCHEMA}", "schema")

    def error(self, message: str, name: str | None = None, *, hint: str | None = None) -> RuleError:
        key = ".".join(part for part in (self.key, name) if part) or None
        line, column = _position(self.path, name)
        return RuleError(message, path=str(self.path), key=key, line=line, column=column, hint=hint)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def choice(self, name: str, known: Iterable[str], default: str | None = None) -> str:
        value = self.values.get(name, default)
        options = tuple(known)
        if value not in options:
            raise self.error(
                f"{value!r} is not one of the {len(options)} {name}s", name, hint=suggestion(str(value), options)
            )
        return str(value)

    def tables(self, name: str, schema: str) -> list[_Table]:
        rows = self.values.get(name, [])
        return [
            _Table(row, self.path, f"{self.key}{'.' if self.key else ''}{name}[{i}]", schema)
            for i, row in enumerate(rows)
        ]

    def expressions(self, name: str) -> tuple[Expression, ...]:
        prefix = f"{self.key}." if self.key else ""
        rows = self.values.get(name, [])
        return tuple(
            compile_expression(row, path=str(self.path), key=f"{prefix}{name}[{i}]") for i, row in enumerate(rows)
        )


def _position(path: Path, name: str | None) -> tuple[int | None, int | None]:
    """Line and column where a key is first written: TOML parsers keep no positions, and one look finds most."""
    if name is None:
        return None, None
    pattern = re.compile(rf"(?:^|[\s{{,.\[]){re.escape(name)}\s*[=\]]")
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            match = pattern.search(line)
            if match:
                return number, line.index(name, match.start()) + 1
    except OSError:
        pass
    return None, None


def compile_pattern(text: str, *, path: str, key: str) -> Any:
    """Compile a pattern of a signature: a plain space matches any white space, so that wrapped lines match too.

    Groups are named after facts; a group without the ``_bytes`` of its fact holds a size with its unit. Raises RuleError.
    """
    import regex

    if len(text) > MAX_PATTERN_CHARS:
        raise RuleError(f"pattern longer than {MAX_PATTERN_CHARS} characters", path=path, key=key)
    try:
        compiled = regex.compile(_flexible_spaces(text))
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        position = getattr(error, "pos", None)
        raise RuleError(
            f"not a pattern: {error}", path=path, key=key, column=None if position is None else position + 1
        ) from None
    for group in compiled.groupindex:
        if group_fact(group) is None and not group.startswith("_"):
            hint = suggestion(group, REGISTRY)
            raise RuleError(f"the group {group!r} is no fact", path=path, key=key, hint=hint)
    return compiled


def group_fact(group: str) -> str | None:
    """The fact that a named group fills: ``tried_bytes`` by itself, ``tried`` and ``tried_gib`` (a bare GiB figure) too.

    A trailing ``__2`` lets one pattern fill the same fact from a second place.
    """
    group = re.sub(r"__\d+\Z", "", group)
    if group in REGISTRY:
        return group
    name = f"{group.removesuffix('_gib')}_bytes"
    return name if name in REGISTRY else None


def group_value(group: str, text: str) -> Fact:
    """The fact a captured group says; raises SettingError where the text is not of the fact's type."""
    name = group_fact(group)
    if name is None:
        raise SettingError(f"the group {group!r} is no fact")
    bare_gib = re.sub(r"__\d+\Z", "", group).endswith("_gib")
    return coerce(name, f"{text} GiB" if bare_gib else text)


def _flexible_spaces(text: str) -> str:
    out, in_class, i = [], False, 0
    while i < len(text):
        char = text[i]
        if char == "\\" and i + 1 < len(text):
            escaped = text[i : i + 2]
            out.append(r"\s+" if escaped == "\\ " and not in_class else escaped)
            i += 2
            continue
        if char == "[":
            in_class = True
        elif char == "]":
            in_class = False
        out.append(r"\s+" if char == " " and not in_class else char)
        i += 1
    return "".join(out)


def _signature(raw: dict[str, Any], path: Path) -> Signature:
    table = _Table(raw, path, "", "signature")
    context = bool(table.get("context", False))
    if context == ("kind" in raw):
        raise table.error("exactly one of kind and context = true says what the file is", "kind")
    kind = None if context else table.choice("kind", KINDS)
    phase = table.choice("phase", PHASES, "unknown")
    wordings = []
    for i, row in enumerate(table.tables("wording", "wording")):
        key = f"wording[{i}].pattern"
        pattern = compile_pattern(row.get("pattern"), path=str(path), key=key)
        if not row.get("anchor").strip() or "\n" in row.get("anchor"):
            raise row.error("the anchor is a non-empty literal on one line", "anchor")
        for name in row.get("facts", {}):
            if name not in REGISTRY:
                raise row.error(f"unknown fact {name!r}", name, hint=suggestion(name, REGISTRY))
        versions = row.get("versions")
        if versions is not None:
            _check_versions(versions, row)
        own_phase = row.choice("phase", PHASES) if row.get("phase") else None
        wordings.append(
            Wording(row.get("anchor"), pattern, row.get("source"), versions, row.get("facts", {}), own_phase)
        )
    tests = tuple(t.values for t in table.tables("test", "signature test"))
    return Signature(str(path), kind, table.get("framework"), phase, tuple(wordings), tests)


def _check_versions(versions: str, row: _Table) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        raise row.error(f"not a version range: {versions!r}", "versions", hint='write it as ">=0.8,<0.20"') from None


def _rule(raw: dict[str, Any], path: Path) -> Rule:
    table = _Table(raw, path, "", "rule")
    if not re.fullmatch(r"[A-Z]{2,8}\d{3}", table.get("code")):
        raise table.error("a code is two to eight capitals and three digits, OG201 for example", "code")
    table.choice("status", _STATUSES)
    for kind in table.get("kinds"):
        if kind not in KINDS:
            raise table.error(f"unknown kind {kind!r}", "kinds", hint=suggestion(str(kind), KINDS))
    for name in table.get("unknown", []):
        if name not in REGISTRY:
            raise table.error(f"unknown fact {name!r}", "unknown", hint=suggestion(str(name), REGISTRY))
    confidence = []
    for row in table.tables("confidence", "confidence"):
        if ("base" in row.values) == ("add" in row.values):
            raise row.error("exactly one of base and add")
        when = row.get("when")
        condition = compile_expression(when, path=str(path), key=f"{row.key}.when") if when is not None else None
        confidence.append(Confidence(row.get("base"), float(row.get("add", 0.0)), condition))
    if not confidence or confidence[0].base is None:
        raise table.error("the first step of confidence is a base", "confidence")
    explain = _Table(table.get("explain"), path, "explain", "explain")
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


def _fix(row: _Table, path: Path) -> Fix:
    effect = row.choice("effect", [str(effect) for effect in Effect])
    if sum(name in row.values for name in ("solve", "value", "lever")) != 1:
        raise row.error("exactly one of solve, value and lever")
    if ("lever" in row.values) != ("missing" in row.values):
        raise row.error("lever and missing come together")
    value = row.get("value")
    return Fix(
        setting=row.get("setting"), effect=Effect.parse(effect), solve=row.get("solve"),
        value=compile_expression(value, path=str(path), key=f"{row.key}.value", result=None) if value else None,
        when=row.expressions("when"), tradeoff=row.get("tradeoff", ""), alternative=bool(row.get("alternative", False)),
        lever=row.get("lever", ""), missing=row.get("missing", ""),
    )  # fmt: skip
