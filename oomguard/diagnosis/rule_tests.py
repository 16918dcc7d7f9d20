"""Run the tests in rule files, for ``oomguard rules test`` and pytest.

A problem is one line of text with the file and the mistake; an empty list is a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomguard.core.errors import OomguardError, SettingError
from oomguard.core.facts import REGISTRY, Fact
from oomguard.core.incident import Effect, Incident, SettingInForce
from oomguard.core.settings import SETTINGS
from oomguard.diagnosis.diagnose import assess
from oomguard.remedy.failed_call import CallModel
from oomguard.remedy.from_log import SOLVERS
from oomguard.remedy.policy import Policy
from oomguard.rules.rule import Rule, effects_of
from oomguard.rules.rule_files import RuleSet, matches
from oomguard.rules.signature import Quotation, Signature
from oomguard.scan.scan import scan
from oomguard.scan.source import Line

# The numbers of a failed call that a rule's test may set besides facts.
_CALL_FIGURES: Final = frozenset({"row_bytes", "seen_row_bytes", "attempts_left"})


def problems(rules: RuleSet) -> list[str]:
    """Return every problem of every signature, rule and quotation."""
    found: list[str] = []
    for signature in rules.signatures:
        found += [f"{signature.path}: {text}" for text in _signature_problems(signature, rules)]
    for rule in rules.rules:
        found += [f"{rule.path}: {text}" for text in _rule_problems(rule, rules)]
    for quotation in rules.quotations:
        found += [
            f"quotation {quotation.name!r}: {text}"
            for text in _quotation_problems(quotation, rules)
        ]
    return found


def _lines(log: str) -> Iterator[Line]:
    return (Line(number, 0, text) for number, text in enumerate(log.splitlines(), 1))


def _signature_problems(signature: Signature, rules: RuleSet) -> Iterator[str]:
    alone = RuleSet((signature,), ())
    hit: set[str] = set()
    negatives = 0
    for i, test in enumerate(signature.tests):
        text = " ".join(test["log"].split())
        matched = [
            w for w in signature.wordings if w.anchor in text and w.pattern.search(test["log"])
        ]
        hit |= {w.pattern.pattern for w in matched}
        if test.get("expect_no_match"):
            negatives += 1
            if matched:
                yield f"test[{i}] matches, but should not"
            continue
        if not matched:
            yield f"test[{i}] does not match"
            continue
        probe = test["log"]
        if signature.kind is None:  # only a following incident shows the facts of a context line
            probe += "\nRuntimeError: Engine core initialization failed. See root cause above."
            alone = RuleSet(
                tuple(s for s in rules.signatures if s is signature or s.kind == "engine_dead"), ()
            )
        incidents = scan(_lines(probe), alone).incidents
        wanted = (
            "none" if any(wording.ends == "told" for wording in matched) else "one"
        )  # a later death does not count
        if len(incidents) != (wanted == "one"):
            yield f"test[{i}] gives {len(incidents)} incidents, expected {wanted}"
            continue
        for name, value in test.get("expect", {}).items():
            fact = incidents[0].facts.get(name)
            if fact is None or not _equal(fact.value, value):
                yield (
                    f"test[{i}]: {name} is {fact.value if fact else 'missing'}, expected {value}"
                )
        owners = {i.kind for i in scan(_lines(test["log"]), rules).incidents} - {None}
        own = {signature.kind, *(w.kind for w in matched if w.kind), *signature.becomes.values()}
        if signature.kind is not None and not (len(owners) == 1 and owners <= own):
            yield (
                f"test[{i}] is claimed by "
                f"{', '.join(sorted(map(str, owners))) or 'no signature'}, expected only "
                f"{signature.kind}"
            )
    if len(hit) < len({w.pattern.pattern for w in signature.wordings}):
        yield "a wording has no test"
    if not negatives:
        yield "no near miss: add one test with expect_no_match = true"


def _quotation_problems(quotation: Quotation, rules: RuleSet) -> Iterator[str]:
    alone = RuleSet(rules.signatures, (), (quotation,))
    vetoed = 0
    for i, text in enumerate(quotation.quoted):
        if scan(_lines(text), alone).incidents:
            yield f"quoted[{i}] is reported anyway"
        else:
            vetoed += bool(scan(_lines(text), RuleSet(rules.signatures, ())).incidents)
    if not vetoed:
        yield "no quoted text that would be reported without it"
    for i, text in enumerate(quotation.real):
        if not scan(_lines(text), rules).incidents:
            yield f"real[{i}] is not reported"


def _equal(found: Any, expected: Any) -> bool:
    if (
        not isinstance(expected, str)
        and not isinstance(found, str)
        and float in {type(expected), type(found)}
    ):
        return abs(float(found) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))
    return bool(found == expected)


def incident_from(kind: str, values: Mapping[str, Any]) -> Incident:
    """Build an incident from the facts of a rule's test; ``…_set`` facts also become settings."""
    facts = {name: Fact(name, value, "given") for name, value in values.items()}
    settings = {}
    for name, value in values.items():
        setting = name.removesuffix("_set")
        if name.endswith("_set") and setting in SETTINGS:
            settings[setting] = SettingInForce(setting, values.get(setting), value, "given")
    return Incident(
        kind=kind,
        message="",
        facts=facts,
        settings=settings,
        phase=str(values.get("phase", "unknown")),
        framework=str(values.get("framework", "unknown")),
    )


def model_from(test: Mapping[str, Any]) -> CallModel | None:
    """Return the failed call of a rule's test, or None without ``call``.

    Its rows are the test's ``batch_size``.

    Raises:
        SettingError: a number is impossible.
    """
    if "call" not in test:
        return None
    figures = dict(test["call"])
    facts = test["facts"]
    rows = facts.get("batch_size", 1)
    base = facts.get("baseline_bytes")
    numbers = (rows, *figures.values(), *(() if base is None else (base,)))
    if not set(figures) <= _CALL_FIGURES or not all(
        type(n) is int and 0 < n < 2**63 for n in numbers
    ):
        raise SettingError(
            "call: numbers must be above zero",
            hint=f"one or more of {', '.join(sorted(_CALL_FIGURES))}",
        )
    return CallModel(rows, base, **figures)


# one check after another
def _rule_problems(rule: Rule, rules: RuleSet) -> Iterator[str]:
    covered: set[str] = set()
    negatives = 0
    for i, test in enumerate(rule.tests):
        strangers = [name for name in test["facts"] if name not in REGISTRY]
        if strangers:
            yield f"test[{i}]: unknown facts: {', '.join(strangers)}"
            continue
        try:
            observed = incident_from(test["kind"], test["facts"])
            incident = assess(observed, rules, Policy(), memory_model=model_from(test))
        except OomguardError as error:
            yield f"test[{i}]: {error}"
            continue
        if test.get("expect_no_match"):
            negatives += 1
            if matches(rule, incident):
                yield f"test[{i}] matches, but should not"
            continue
        cause = next((c for c in incident.causes if c.rule == rule.code), None)
        if cause is None:
            yield f"test[{i}] does not match"
            continue
        expect = test.get("expect", {})
        if expect.get("cause", cause.id) != cause.id:
            yield f"test[{i}]: the cause is {cause.id}, expected {expect['cause']}"
        if expect.get("text", "") not in cause.explanation:
            yield f"test[{i}]: the text is {cause.explanation!r}"
        planned = {p.setting: (p.new, p.reason) for p in incident.plan} | {
            a.setting: (a.new, a.why_not) for a in incident.alternatives
        }
        for row in [*expect.get("plan", []), *expect.get("alternatives", [])]:
            covered.add(row["setting"])
            value, reason = planned.get(row["setting"], ("absent", ""))
            if row["to"] == "unsolved":
                wanted = None
            else:
                wanted = row["to"]
            if not (value is wanted if wanted is None or value is None else _equal(value, wanted)):
                yield f"test[{i}]: {row['setting']} is {value}, expected {wanted} ({reason})"
            if row.get("reason", "") not in reason:
                yield f"test[{i}]: the reason for {row['setting']} is {reason!r}"
    for fix in rule.fixes:
        if fix.setting not in SETTINGS:
            yield f"no setting named {fix.setting}"
        elif fix.effect not in effects_of(SETTINGS[fix.setting], None):
            yield f"{fix.setting} is never {fix.effect}"
        if fix.solve is not None and fix.solve not in SOLVERS:
            yield f"no solver named {fix.solve}"
        if fix.effect == Effect.CHANGES_OUTPUTS and not fix.tradeoff:
            yield f"{fix.setting} changes outputs but has no tradeoff"
        if fix.setting not in covered and not fix.lever:
            yield f"the fix {fix.setting} has no test"
    if not negatives:
        yield "no negative test: add one with expect_no_match = true"
    if not rule.references:
        yield "no reference"
