"""Fill facts into sentences: headlines, rule explanations and rule pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from oomguard.core.facts import GIB, MIB, Fact, format_rounded

# A log may contain terminal escapes and control characters, but a terminal must not get them. The
# pattern matches CSI, OSC and two-byte escapes (ECMA-48), every other control character except tab,
# and marks that change the text direction. Text after an OSC that never ends is kept.

# CSI, OSC (ended, or alone where it never ends: the text after it is kept) and two-byte escapes
# (ECMA-48), then every other control character but tab, and the marks that turn the direction of
# text.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\]|\x1b[@-_]?"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def strip_escapes(line: str) -> str:
    """Remove terminal escapes and control characters, so that the line is safe to print."""
    return _ESCAPES.sub("", line)


PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\|\w+)*)(?::(\w+))?\}")
# These are Linux numbers, because engines run on Linux; the log may be read elsewhere.
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


# An optional part is in brackets and contains a placeholder; the innermost is matched first.
_OPTIONAL: Final = re.compile(r"\[(?![^{}]*\})([^\[\]]*)\]")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+")
# Sizes in one sentence share one unit. It is MiB if one of them is too small for GiB, unless
# another one is larger than the second limit.
_SMALL_BYTES: Final = 0.1 * GIB
_LARGE_BYTES: Final = 10 * GIB
_SIZES: Final = frozenset({"GiB", "excess"})


def render(template: str, facts: Mapping[str, Fact]) -> str:
    """Fill a template with facts, and leave out the parts that need an unknown fact.

    A part is text in brackets (which may be nested), a clause after a semicolon, or the sentence.

    Args:
        template: ``{fact}`` prints a value as it is, ``{fact:GiB}`` prints bytes as a size,
            ``{fact:excess}`` a negative number of bytes as a size above zero, ``{fact:count}`` a
            number with commas, ``{fact:percent}`` a share, ``{fact:signal}`` the name of a signal.
            ``{first|second}`` prints the first known fact.
        facts: the known facts, by name.

        >>> render("{a:GiB} free[ of {b:GiB}].", {"a": Fact("a", 2 * GIB)})
        '2.00 GiB free.'
    """
    sentences = (_filled(sentence, facts) for sentence in _SENTENCE_END.split(template))
    return " ".join(filter(None, sentences))


def first_known(templates: Iterable[str], facts: Mapping[str, Fact]) -> str:
    """Return the first template whose facts are all known, filled in; "" if there is none."""
    for template in templates:
        if is_known(template, facts):
            return render(template, facts)
    return ""


def is_known(text: str, facts: Mapping[str, Fact]) -> bool:
    """Return whether every fact that a template needs is known."""
    return all(_fact(found, facts) is not None for found in PLACEHOLDER.finditer(text))


def without_brackets(template: str) -> str:
    """Return a template without the brackets of its optional parts."""
    return _without_optional(template, lambda _part: True)


def _without_optional(text: str, keeps: Callable[[str], bool]) -> str:
    """Remove the brackets of optional parts, and remove the parts that are not kept."""

    def part(match: re.Match[str]) -> str:
        inner = match.group(1)
        if not PLACEHOLDER.search(inner):
            # Brackets with another meaning, such as a[0].
            return match.group()
        if keeps(inner):
            return inner
        return ""

    while (shorter := _OPTIONAL.sub(part, text)) != text:
        text = shorter
    return text


def _filled(sentence: str, facts: Mapping[str, Fact]) -> str:
    """Fill one sentence, without the parts that need an unknown fact; "" if nothing is left."""
    sentence = _without_optional(sentence, lambda part: is_known(part, facts))
    first, *more = (clause.strip() for clause in sentence.rstrip().removesuffix(".").split("; "))
    if not first or not is_known(first, facts):
        return ""
    clauses = [first]
    for clause in more:
        if is_known(clause, facts):
            clauses.append(clause)
    known = "; ".join(clauses)
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
    for name in placeholder.group(1).split("|"):
        if name in facts:
            return facts[name]
    return None


def _is_in_mib(text: str, facts: Mapping[str, Fact]) -> bool:
    """Return whether to write the sentence's sizes in MiB, because one is too small for GiB."""
    sizes = []
    for placeholder in PLACEHOLDER.finditer(text):
        fact = _fact(placeholder, facts)
        if fact is None or placeholder.group(2) not in _SIZES:
            continue
        if not isinstance(fact.value, str) and fact.value:
            sizes.append(abs(fact.value))
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
    if form == "excess":
        return _size(-value, fact.slack, in_mib=in_mib)
    if form == "count":
        return f"{value:,.0f}"
    if form == "percent":
        return f"{100 * value:.1f}%"
    if form == "signal":
        return _SIGNALS.get(int(value), f"signal {value:.0f}")
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _size(value: float, slack: float, *, in_mib: bool) -> str:
    if not value and not slack:
        return "0 bytes"
    if in_mib and value and slack > 0.1 * abs(value):
        return f"about {value / MIB:.2g} MiB"
    if in_mib and _SMALL_BYTES <= abs(value) < _LARGE_BYTES:
        return f"{value / MIB:.{0 if slack >= MIB / 2 else 2}f} MiB"
    return format_rounded(value, slack)
