"""Rank causes: match every rule and fill in its confidence, evidence and text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from oomguard.core.facts import Fact
from oomguard.core.incident import Cause, Evidence, Incident
from oomguard.core.text import render
from oomguard.rules.rule import Rule
from oomguard.rules.rule_files import RuleSet

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
    named = set(
        re.findall(
            r"\w+",
            " ".join([rule.summary, rule.why, *(condition.source for condition in rule.when)]),
        )
    )
    lines = {
        incident.location.line,
        *(fact.line for name, fact in incident.facts.items() if name in named),
    }
    return tuple(evidence for evidence in incident.evidence if evidence.line in lines)
