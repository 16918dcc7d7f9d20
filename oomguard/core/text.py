"""Sentences with facts in them: the templates of headlines, of rule files and of their pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from oomguard.core.facts import GIB, MIB, Fact, format_rounded

# Terminal escapes and control characters: what a log may hold and a terminal must not get.

# CSI, OSC (ended, or alone where it never ends: the text after it is kept) and two-byte escapes
# (ECMA-48), then every other control character but tab, and the marks that turn the direction of
# text.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\]|\x1b[@-_]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def strip_escapes(line: str) -> str:
    """Return the line without terminal escapes and control characters: safe to print, safe to
    match.
    """
    return _ESCAPES.sub("", line)


PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\|\w+)*)(?::(\w+))?\}")
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


# What may be dropped of a sentence: a part in brackets with a placeholder, the innermost first.
_OPTIONAL: Final = re.compile(r"\[(?![^{}]*\})([^\[\]]*)\]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
# Sizes that are compared have one unit: MiB, if one of them is too small for GiB, unless another is
# larger than this.
_SMALL_BYTES: Final = 0.1 * GIB
_LARGE_BYTES: Final = 10 * GIB


def render(template: str, facts: Mapping[str, Fact]) -> str:
    """Fill a template's placeholders with the values of facts; what needs an unknown fact is left
    out.

    A part in brackets is left out, or a clause behind a semicolon, or else the whole sentence.
    Brackets may be nested.

    Args:
        template: ``{fact}`` prints a value as it is, ``{fact:GiB}`` bytes as a size,
            ``{fact:percent}`` a share, ``{fact:signal}`` the signal of that number,
            ``{first|second}`` the first of the facts that is known.
        facts: the known facts, by name.
    """
    sentences = (_filled(sentence, facts) for sentence in _SENTENCE_END.split(template))
    return " ".join(sentence for sentence in sentences if sentence)


def first_known(templates: Iterable[str], facts: Mapping[str, Fact]) -> str:
    """Return the first template whose facts are all known, filled in; "" if there is none."""
    return next(
        (render(template, facts) for template in templates if _is_known(template, facts)), ""
    )


def without_brackets(template: str) -> str:
    """Return a template as a sentence that needs all of its facts."""
    return _without_optional(template, lambda _part: True)


def _without_optional(text: str, keeps: Callable[[str], bool]) -> str:
    """Return a text without the brackets of its optional parts, and without the parts that are not
    kept.
    """

    def part(match: re.Match[str]) -> str:
        inner = match.group(1)
        if not PLACEHOLDER.search(inner):
            return match.group()  # brackets of another meaning: a[0], for example
        if keeps(inner):
            return inner
        return ""

    while (shorter := _OPTIONAL.sub(part, text)) != text:
        text = shorter
    return text


def _filled(sentence: str, facts: Mapping[str, Fact]) -> str:
    """Return one sentence with its values, without what needs an unknown fact; empty if nothing is
    left.
    """
    sentence = _without_optional(sentence, lambda part: _is_known(part, facts))
    first, *more = (clause.strip() for clause in sentence.rstrip().removesuffix(".").split("; "))
    if not first or not _is_known(first, facts):
        return ""
    known = "; ".join([first, *(clause for clause in more if _is_known(clause, facts))])
    if sentence.rstrip().endswith("."):
        end = "."
    else:
        end = ""
    in_mib = _is_in_mib(known, facts)
    return (
        " ".join(PLACEHOLDER.sub(lambda found: _value(found, facts, in_mib=in_mib), known).split())
        + end
    )


def _fact(placeholder: re.Match[str], facts: Mapping[str, Fact]) -> Fact | None:
    return next((facts[name] for name in placeholder.group(1).split("|") if name in facts), None)


def _is_known(text: str, facts: Mapping[str, Fact]) -> bool:
    return all(_fact(found, facts) is not None for found in PLACEHOLDER.finditer(text))


def _is_in_mib(text: str, facts: Mapping[str, Fact]) -> bool:
    """Return whether the sizes of a sentence that are not large are written in MiB: one of several
    is too small for GiB.
    """
    found = (_fact(found, facts) for found in PLACEHOLDER.finditer(text) if found.group(2) == "GiB")
    sizes = [
        abs(fact.value)
        for fact in found
        if fact is not None and not isinstance(fact.value, str) and fact.value
    ]
    return len(sizes) > 1 and min(sizes) < _SMALL_BYTES


def _value(placeholder: re.Match[str], facts: Mapping[str, Fact], *, in_mib: bool) -> str:
    fact = _fact(placeholder, facts)
    if fact is None:
        return ""
    value = fact.value
    form = placeholder.group(2)
    if isinstance(value, (str, bool)):
        return str(value)
    if form == "GiB":
        return _size(value, fact.slack, in_mib=in_mib)
    if form == "percent":
        return f"{100 * value:.1f} %"
    if form == "signal":
        return _SIGNALS.get(int(value), f"signal {value:.0f}")
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _size(value: float, slack: float, *, in_mib: bool) -> str:
    if not value and not slack:
        return "0 bytes"
    if in_mib and _SMALL_BYTES <= abs(value) < _LARGE_BYTES and slack <= 0.1 * abs(value):
        return f"{value / MIB:.{0 if slack >= MIB / 2 else 2}f} MiB"
    return format_rounded(value, slack)
