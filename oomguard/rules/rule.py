"""Read rules: why memory ran out and what to do about it; one file per rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from oomguard.core.facts import REGISTRY, FactValue
from oomguard.core.incident import CAUSES, KINDS, Effect
from oomguard.core.settings import SETTINGS, Setting
from oomguard.core.text import PLACEHOLDER
from oomguard.rules.syntax import KINDS_OF_VALUE, Expression, Table, suggestion, trusted_expression

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
    if make is not trusted_expression:  # a test checks the shipped ones
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
    table = Table(raw, path, "", "rule")
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
    explain = Table(table.get("explain"), path, "explain", "explain")
    if make is trusted_expression:
        return explain
    for name in ("summary", "why", "confirm"):
        for fact in (
            fact for names, _ in PLACEHOLDER.findall(explain.get(name)) for fact in names.split("|")
        ):
            if fact not in REGISTRY:
                raise explain.error(f"unknown fact {fact!r}", name, hint=suggestion(fact, REGISTRY))
    return explain
