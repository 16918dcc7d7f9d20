"""Sentences with facts in them: the templates of headlines, of rule files and of their pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from oomguard.facts import Fact, format_rounded

PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\|\w+)*)(?::(\w+))?\}")
# A clause that is dropped unless all its facts are known.
OPTIONAL: Final = re.compile(r"\[([^\[\]{}]*\{[^\[\]]*)\]")
# By their numbers on Linux, where the engines run; the log may be read elsewhere.
_SIGNALS: Final = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
    24: "SIGXCPU",
    31: "SIGSYS",
}


def render(template: str, facts: Mapping[str, Fact]) -> str:
    """Fill a template's placeholders with the values of facts; an unknown fact reads "unknown".

    Args:
        template: ``{fact}`` prints a value as it is, ``{fact:GiB}`` bytes as a size, ``{fact:percent}`` a share,
            ``{fact:signal}`` the signal of that number, ``{first|second}`` the first of the facts that is known. A clause in
            square brackets with a placeholder is left out if one of its facts is unknown.
        facts: the known facts, by name.
    """

    def fill(match: re.Match[str]) -> str:
        fact = next((facts[name] for name in match.group(1).split("|") if name in facts), None)
        if fact is None:
            return "unknown"
        value = fact.value
        if isinstance(value, (str, bool)):
            return str(value)
        if match.group(2) == "GiB":
            return format_rounded(value, fact.slack)
        if match.group(2) == "percent":
            return f"{100 * value:.1f} %"
        if match.group(2) == "signal":
            return _SIGNALS.get(int(value), f"signal {value:.0f}")
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    def clause(match: re.Match[str]) -> str:
        named = (names.split("|") for names, _ in PLACEHOLDER.findall(match.group(1)))
        return match.group(1) if all(set(names) & set(facts) for names in named) else ""

    return " ".join(PLACEHOLDER.sub(fill, OPTIONAL.sub(clause, template)).split())
