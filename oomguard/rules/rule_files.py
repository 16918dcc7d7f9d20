"""Load all signatures, rules and actions: the shipped files, then the user's folders."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from oomguard.core.errors import RuleError
from oomguard.core.facts import REGISTRY, Fact, FactValue
from oomguard.core.files import read_tables
from oomguard.core.incident import CAUSES, KINDS, PHASES, Cause, Effect, Evidence, Incident, Missing
from oomguard.core.settings import SETTINGS, Setting, is_version_in
from oomguard.core.text import PLACEHOLDER, render
from oomguard.rules.signature import (
    LazyPattern,
    Quotation,
    Signature,
    Wording,
    check_versions,
    compile_pattern,
    read_quotations,
    read_signature,
)
from oomguard.rules.syntax import (
    KINDS_OF_VALUE,
    Expression,
    Table,
    compile_expression,
    read_toml,
    suggestion,
    trusted_expression,
)

# A mistake in a fix becomes a message when the rule loads.

_EFFECTS: Final = {str(effect): effect for effect in Effect}
# The solvers that a fix may name; they are functions of remedy/solvers.
SOLVERS: Final = (
    "blocks_for_max_len",
    "context_for_buffers",
    "graphs_that_were_captured",
    "host_cache_within_free",
    "host_ratio_within_free",
    "kv_bytes_for_max_len",
    "kv_bytes_for_tried",
    "kv_bytes_for_reserve",
    "kv_bytes_within_free",
    "options_for_pieces",
    "page_for_requests",
    "printed_estimate",
    "ranks_for_weights",
    "requests_in_pool",
    "requests_in_table",
    "rows_that_fit",
    "sequences_for_warmup",
    "static_share_for_pool",
    "static_share_for_tried",
    "step_tokens_for_tried",
    "utilization_for_kv_cache",
    "utilization_for_max_len",
    "utilization_for_reserve",
    "utilization_for_tried",
    "utilization_within_free",
    "without_graph_estimate",
    "without_graphs",
)
_WRITTEN: Final = {"number": "a number", "bool": "True or False", "text": "text in single quotes"}


class Fix(NamedTuple):
    """Describe one setting to change, with a named solver or an expression for its value.

    A fix without a computable value names its target (``lever``) and the ``missing`` number.
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


def read_fix(row: Table, path: Path, make: Callable[..., Expression]) -> Fix:
    """Read one fix; ``make`` turns a text into an expression.

    Raises:
        RuleError: the fix has a mistake.
    """
    effect = row.choice("effect", _EFFECTS)
    if sum(name in row.values for name in ("solve", "value", "lever")) != 1:
        raise row.error("give exactly one of solve, value and lever")
    if not row.get("value", "x").strip():
        raise row.error("the value is empty", "value")
    if ("lever" in row.values) != ("missing" in row.values):
        raise row.error("lever and missing must come together")
    value = row.get("value")
    fix = Fix(
        setting=row.get("setting"),
        effect=_EFFECTS[effect],
        solve=row.get("solve"),
        value=make(value, path=str(path), key=f"{row.key}.value", result=None) if value else None,
        when=row.expressions("when", make),
        tradeoff=row.get("tradeoff", ""),
        alternative=bool(row.get("alternative", False)),
        lever=row.get("lever", ""),
        missing=row.get("missing", ""),
    )
    # A test checks the shipped ones.
    if make is not trusted_expression:
        _check(fix, row)
    return fix


def _check(fix: Fix, row: Table) -> None:
    """Raise RuleError for an unknown setting, value, effect or solver."""
    knob = SETTINGS.get(fix.setting)
    if knob is None:
        hint = suggestion(fix.setting.lstrip("-").replace("-", "_"), SETTINGS)
        raise row.error(f"unknown setting {fix.setting!r}", "setting", hint=hint)
    if fix.solve is not None:
        row.choice("solve", SOLVERS)
    constant = None
    if fix.value is not None:
        found = fix.value.kind
        wanted = KINDS_OF_VALUE[knob.type]
        if found != wanted:
            hint = f"write {_WRITTEN[wanted]}"
            raise row.error(
                f"{knob.name} is {knob.type}, but the value is a {found}", "value", hint=hint
            )
        constant = fix.value.evaluate({})
        if _is_number(constant) and not _is_possible(knob, constant):
            raise row.error(
                f"{knob.name} is never {constant:g}", "value", hint="write a number above zero"
            )
    possible = effects_of(knob, constant)
    if fix.effect not in possible:
        allowed = " or ".join(str(effect) for effect in sorted(possible))
        if constant is None:
            changed = knob.name
        else:
            changed = f"{knob.name} = {constant}"
        raise row.error(f"{changed} is never {fix.effect}", "effect", hint=f"it is {allowed}")


def effects_of(knob: Setting, constant: FactValue | None) -> set[Effect]:
    """Return the possible effects of changing a setting, or of changing it to a known value."""
    if isinstance(constant, bool):
        return {knob.raised if constant else knob.lowered}
    if isinstance(constant, str):
        if constant in knob.values:
            return {knob.values[constant]}
        return {knob.raised, knob.lowered}
    return {knob.raised, knob.lowered, *(() if knob.type != "str" else knob.values.values())}


def _is_number(value: FactValue | None) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_possible(knob: Setting, value: float) -> bool:
    """Return whether a number is valid for a setting.

    It must be above zero, and whole for counts. -1 in max_model_len means "fit it".
    """
    if knob.name == "max_model_len" and value == -1:
        return True
    return value > 0 and (knob.type == "float" or value == int(value))


_STATUSES: Final = ("experimental", "stable", "deprecated")
_CODE: Final = re.compile(r"[A-Z]{2,8}\d{3}")


class Confidence(NamedTuple):
    """Describe one step of a rule's confidence.

    ``base`` sets the confidence; ``add`` changes it if ``when`` is true.
    """

    base: float | None
    add: float
    when: Expression | None


class Rule(NamedTuple):
    """Hold a rule: conditions on facts, explanation, fixes and the rule's own tests."""

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
    """Read one rule file; ``make`` turns a text into an expression.

    Raises:
        RuleError: the file has a mistake.
    """
    table = Table(raw, path, "", "rule", is_shipped=make is trusted_expression)
    if not _CODE.fullmatch(table.get("code")):
        raise table.error(
            "a code is two to eight capitals and three digits, OG201 for example", "code"
        )
    table.choice("status", _STATUSES)
    kinds = table.choices("kinds", KINDS, "kind")
    unknown = table.choices("unknown", REGISTRY, "fact")
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


def _shown(
    table: Table, name: str, schema: str, make: Callable[..., Expression]
) -> tuple[Mapping[str, Any], ...]:
    """Return rows that do not affect a diagnosis.

    For a shipped rule they are checked on use, not at each start.
    """
    if make is trusted_expression:
        return tuple(table.get(name, ()))
    return tuple(row.values for row in table.tables(name, schema))


def _confidence(
    table: Table, path: Path, make: Callable[..., Expression]
) -> tuple[Confidence, ...]:
    steps = []
    for row in table.tables("confidence", "confidence"):
        if ("base" in row.values) == ("add" in row.values):
            raise row.error("give exactly one of base and add")
        if "base" in row.values:
            name = "base"
        else:
            name = "add"
        if not -1 <= row.get(name) <= 1:
            raise row.error("a confidence must be between 0 and 1", name)
        when = row.get("when")
        if when is not None:
            condition = make(when, path=str(path), key=f"{row.key}.when")
        else:
            condition = None
        steps.append(Confidence(row.get("base"), float(row.get("add", 0.0)), condition))
    if not steps or steps[0].base is None:
        raise table.error("the first step of confidence must be a base", "confidence")
    return tuple(steps)


def _explain(table: Table, path: Path, make: Callable[..., Expression]) -> Table:
    """Return the rule's texts and check that every placeholder is a fact.

    Tests check the texts of shipped rules.
    """
    explain = Table(table.get("explain"), path, "explain", "explain", is_shipped=table.is_shipped)
    if table.is_shipped:
        return explain
    for name in ("summary", "why", "confirm"):
        for names, _ in PLACEHOLDER.findall(explain.get(name)):
            for fact in names.split("|"):
                if fact not in REGISTRY:
                    hint = suggestion(fact, REGISTRY)
                    raise explain.error(f"unknown fact {fact!r}", name, hint=hint)
    return explain


# The table of actions, rules/actions.toml: their order by situation, and their wording.

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


class ActionTable(NamedTuple):
    """Hold all situations, wordings and harmful actions; the first matching row applies."""

    situations: tuple[Situation, ...] = ()
    wordings: tuple[ActionWording, ...] = ()
    never: tuple[Situation, ...] = ()

    def joined(self, other: ActionTable) -> ActionTable:
        """Return both tables as one; the rows of this one come first."""
        return ActionTable(
            self.situations + other.situations,
            self.wordings + other.wordings,
            self.never + other.never,
        )

    def fitting(self, incident: Incident) -> Iterator[Situation]:
        """Yield the situations of a failure; the first one that leads to an action applies."""
        for row in self.situations:
            if row.where.fits(incident):
                yield row

    def is_harmful(self, name: str, direction: str | None, incident: Incident) -> bool:
        """Return whether an action would make a failure worse.

        A row without a direction covers every direction.
        """
        for row in self.never:
            is_listed = (name, None) in row.actions or (name, direction) in row.actions
            if is_listed and row.where.fits(incident):
                return True
        return False

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
    table = Table(raw, path, "", "actions_file", is_shipped=make is trusted_expression)
    # A test checks the shipped file.
    checked = make is not trusted_expression
    lists: dict[str, list[Situation]] = {"situation": [], "never": []}
    for kind, key in (("situation", "first"), ("never", "actions")):
        for row in table.tables(kind, kind):
            where = _where(row, path, make, checked=checked)
            actions = tuple(_split(label, row, checked) for label in row.get(key))
            lists[kind].append(Situation(where, actions))
    wordings = []
    for row in table.tables("wording", "action wording"):
        name, direction = _split(row.get("action"), row, checked)
        texts = (tuple(row.get(key, ())) for key in ("title", "why", "command"))
        wordings.append(
            ActionWording(name, direction, _where(row, path, make, checked=checked), *texts)
        )
    return ActionTable(tuple(lists["situation"]), tuple(wordings), tuple(lists["never"]))


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


# The file of missing information says what would decide a failure, by its kind, engine and phase.


class MissingRow(NamedTuple):
    """Describe one missing piece of information; an empty field matches everything.

    Attributes:
        unknown: facts of which none may be known.
        of_a_log: whether it can be missing only from a saved log, which may be incomplete. A live
            run's output is complete.
    """

    kinds: frozenset[str]
    frameworks: frozenset[str]
    phases: frozenset[str]
    unknown: tuple[str, ...]
    missing: Missing
    of_a_log: bool = False

    def fits(self, incident: Incident, *, is_live: bool) -> bool:
        """Return whether this would decide the incident; ``is_live`` means a live run."""
        if is_live and self.of_a_log:
            return False
        conditions = (
            (self.kinds, incident.kind),
            (self.frameworks, incident.framework),
            (self.phases, incident.phase),
        )
        if any(wanted and value not in wanted for wanted, value in conditions):
            return False
        return not any(name in incident.facts for name in self.unknown)


def read_missing(raw: dict[str, Any], path: Path) -> list[MissingRow]:
    """Read the file; raises RuleError for a mistake in it."""
    table = Table(raw, path, "", "missing_file")
    found = []
    for row in table.tables("missing", "missing"):
        found.append(
            MissingRow(
                kinds=frozenset(row.choices("kinds", KINDS, "kind")),
                frameworks=frozenset(row.get("frameworks", [])),
                phases=frozenset(row.get("phases", [])),
                unknown=tuple(row.choices("unknown", REGISTRY, "fact")),
                missing=Missing(row.get("what"), row.get("command")),
                of_a_log=row.get("of_a_log", False),
            )
        )
    return found


def find_missing(
    incident: Incident, rows: tuple[MissingRow, ...], *, is_live: bool
) -> Missing | None:
    """Return what would decide an incident with an unknown first cause, or None.

    Args:
        incident: a failure with its causes.
        rows: the rows; the first match counts.
        is_live: whether it failed in a live run, not in a log that may be incomplete.
    """
    if incident.causes and incident.causes[0].id != "unknown":
        return None
    for row in rows:
        if row.fits(incident, is_live=is_live):
            return row.missing
    return None


# Out-of-memory words without a signature: scan/incidents.py reads lines with one of these.
UNRECOGNIZED: Final = (
    "out of memory", "out-of-memory", "Out of memory", "Out of Memory", "Out Of Memory", "OUT OF MEMORY", "OutOfMemory", "MemoryError",
    "out of GPU memory", "out of CUDA memory", "out of device memory", "out of host memory", "out of system memory",
)  # fmt: skip
# Engines print these lines above the exception that ended a process: scan/engine_errors.py reads
# what follows.
ENGINE_ENDS: Final = (
    "EngineCore failed to start", "EngineCore encountered a fatal error", "EngineCore hit an exception", "Process EngineCore",
    ("WorkerProc "
    "failed to "
    "start"), "WorkerProc hit an exception", "Error executing method", "Exception in worker",
    ("Engine background "
    "task failed"), "Scheduler hit an exception", "Failed to initialize executor on rank",
    "Executor worker initialization error", "Shard complete standard error output",
)  # fmt: skip


# It is compared by identity, because a comparison of all its rules would be slow.
@dataclass(frozen=True, eq=False)
class RuleSet:
    """Hold all signatures and rules."""

    signatures: tuple[Signature, ...]
    rules: tuple[Rule, ...]
    quotations: tuple[Quotation, ...] = ()
    missing: tuple[MissingRow, ...] = ()
    actions: ActionTable = field(default_factory=ActionTable)

    # Every scanner reads the anchors, and a guarded failure makes several scanners.
    @functools.cached_property
    def anchors(self) -> tuple[str, ...]:
        """Return all anchors, sorted and unique.

        They are the signatures' anchors, other out-of-memory words, and words of an engine's end.
        """
        own = set()
        for signature in self.signatures:
            for wording in signature.wordings:
                own.add(wording.anchor)
        return tuple(sorted(own.union(UNRECOGNIZED, ENGINE_ENDS)))

    @functools.cached_property
    def wordings_by_anchor(self) -> Mapping[str, list[tuple[int, tuple[Signature, Wording]]]]:
        """Return the wordings of each anchor, with their numbers in the order of the files."""
        found: dict[str, list[tuple[int, tuple[Signature, Wording]]]] = {}
        number = 0
        for signature in self.signatures:
            for wording in signature.wordings:
                found.setdefault(wording.anchor, []).append((number, (signature, wording)))
                number += 1
        return found

    def rule(self, code: str) -> Rule:
        """Return the rule with this code; raises KeyError for an unknown one."""
        return {rule.code: rule for rule in self.rules}[code]


def shipped_root() -> Path:
    """Return the folder of the shipped rules, in the wheel or the source checkout."""
    inside = Path(__file__).with_name("shipped")
    if inside.is_dir():
        return inside
    return Path(__file__).parents[2] / "rules"


def load_rules(extra: Iterable[Path] = (), *, check: bool = False) -> RuleSet:
    """Load the shipped rules, then the user's folders.

    A user's rule replaces the shipped rule of the same code, or is added; a user's signature is
    added. Every mistake names its file, key and line, and a similar valid name if there is one.

    Args:
        extra: the user's folders; oomguard reads every ``.toml`` file below them.
        check: compile the shipped patterns and conditions now, not on first use. A user's are
            always compiled now.

    Raises:
        RuleError: a file is invalid (the first one), or a folder does not exist.
    """
    signatures: list[Signature] = []
    rules: dict[str, Rule] = {}
    quotations: list[Quotation] = []
    missing: list[MissingRow] = []
    actions = ActionTable()
    shipped = shipped_root()
    for root in (shipped, *extra):
        lazy = root == shipped and not check
        pattern = LazyPattern if lazy else compile_pattern
        if lazy:
            expression = trusted_expression
        else:
            expression = compile_expression
        if not _is_folder(root):
            raise RuleError(
                "there is no such folder of rules",
                path=str(root),
                hint="--rules needs a folder of .toml files",
            )
        seen: dict[str, str] = {}
        paths = sorted(root.rglob("*.toml"), key=attrgetter("parts"))
        if lazy:
            tables = read_tables("rules", paths, read_toml)
        else:
            tables = {path: read_toml(path) for path in paths}
        for path, table in tables.items():
            if "cause" in table or "code" in table:
                rule = read_rule(table, path, expression)
                if rule.code in seen:
                    raise RuleError(
                        f"code {rule.code} is already used by {seen[rule.code]}",
                        path=str(path),
                        key="code",
                    )
                seen[rule.code] = path.name
                rules[rule.code] = rule
            elif "quotation" in table:
                quotations += read_quotations(table, path, pattern)
            elif "missing" in table:
                missing += read_missing(table, path)
            elif "situation" in table:
                # A user's rows come before the shipped ones.
                actions = read_actions(table, path, expression).joined(actions)
            else:
                signatures.append(read_signature(table, path, pattern))
    in_order = tuple(rules[code] for code in sorted(rules))
    return RuleSet(tuple(signatures), in_order, tuple(quotations), tuple(missing), actions)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        # A name too long, or a null byte.
        return False


# Rank causes: match every rule and fill in its confidence, evidence and text.


MOST_CONFIDENT: Final = 0.99
# The highest confidence for a failure without a matching signature.
MOST_CONFIDENT_UNRECOGNIZED: Final = 0.7


def confidence(rule: Rule, facts: Mapping[str, Fact]) -> float:
    """Return the rule's confidence for these facts, 0 to 0.99, because a text is never proof.

    A step with an unknown condition does not count.
    """
    total = 0.0
    for step in rule.confidence:
        if step.when is not None and step.when.evaluate(facts) is not True:
            continue
        if step.base is not None:
            total = step.base
        else:
            total = total + step.add
    return round(min(MOST_CONFIDENT, max(0.0, total)), 3)


def matches(rule: Rule, incident: Incident) -> bool:
    """Return whether the rule applies to an incident.

    The kind must match, all conditions must be known to be true, and the ``unknown`` facts must be
    unknown.
    """
    if incident.kind not in rule.kinds or any(name in incident.facts for name in rule.unknown):
        return False
    return all(condition.evaluate(incident.facts) is True for condition in rule.when)


def explain(incident: Incident, rules: RuleSet) -> Incident:
    """Return the incident with its causes, the likeliest first; ties keep the order of codes.

    Without a matching signature a cause has a confidence of at most 0.7.
    """
    causes = []
    for rule in rules.rules:
        if not matches(rule, incident):
            continue
        text = render(f"{rule.summary} {rule.why}", incident.facts) or f"{rule.title}."
        sure = confidence(rule, incident.facts)
        if incident.certainty_ratio is not None:
            sure = round(min(MOST_CONFIDENT_UNRECOGNIZED, sure * incident.certainty_ratio), 3)
        causes.append(
            Cause(
                rule.cause,
                rule.code,
                sure,
                _evidence(rule, incident),
                text,
                rule.title,
                rule.confirm,
            )
        )
    causes.sort(key=lambda cause: -cause.confidence)
    if not causes:
        causes = [
            Cause(
                "unknown",
                "",
                0.0,
                incident.evidence,
                "No rule explains this failure.",
                "The cause is not known",
            )
        ]
    return replace(incident, causes=tuple(causes))


def _evidence(rule: Rule, incident: Incident) -> tuple[Evidence, ...]:
    """Return the message's own line and the lines with this rule's facts."""
    texts = [rule.summary, rule.why, *map(attrgetter("source"), rule.when)]
    named = set(re.findall(r"\w+", " ".join(texts)))
    lines = {incident.location.line}
    for name in incident.facts.keys() & named:
        lines.add(incident.facts[name].line)
    found = []
    for evidence in incident.evidence:
        if evidence.line in lines:
            found.append(evidence)
    return tuple(found)
