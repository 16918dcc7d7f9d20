"""The cause that somebody names beside a failure that they wrote down: "a stale process still held 51 GiB"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from oomguard.facts import Fact
from oomguard.incident import Evidence, Incident
from oomguard.observe.hits import Hit
from oomguard.observe.named_model import named_model
from oomguard.observe.script_values import script_values
from oomguard.observe.search_time import SearchTime
from oomguard.observe.stated_figures import StatedFigures
from oomguard.observe.text import peel
from oomguard.observe.title import mark_chars
from oomguard.observe.window import Window
from oomguard.rules.told import ToldCause

# Beside so many incidents of an input at most.
MAX_TOLD: Final = 20
# So far before and behind the message somebody speaks of it.
BESIDE_LINES: Final = 12
_BESIDE_CHARS: Final = 1500
_SAID_CHARS: Final = 400
# So long a traceback at most stands between a sentence and the message, and so far below its title.
_MOST_ABOVE_LINES: Final = 400
# So near stands what says otherwise, and so many matches are denied at most.
_OTHERWISE_CHARS: Final = 120
_MOST_DENIED: Final = 4
# Frames of a traceback, with the code that they show: nobody wrote them down, and they stand between a sentence and its failure.
_OF_A_TRACEBACK: Final = re.compile(
    r'\s*(?:File "|Traceback \(|-{2,}> ?\d|\d+[ \t]|[\^~][\^~ ]*$)|\s{4,}\S|\S*\.py in \w|\S*\.py:\d+'
)
# A paragraph of a document that is set off: its sentences go on behind the marks.
_BLOCK_QUOTE: Final = re.compile(r"(?m)^\s{0,3}>[ \t]?")


def beside(window: Window, hit: Hit) -> str:
    """Return the lines around a message of this window, its first line among them."""
    above = window.above(hit.first).splitlines()[-BESIDE_LINES:]
    below = "".join(window.texts[hit.last + 1 :]).splitlines()[: BESIDE_LINES + 1]
    text = "\n".join(("\n".join(above)[-_BESIDE_CHARS:], window.texts[hit.first], "\n".join(below)[:_BESIDE_CHARS]))
    return _BLOCK_QUOTE.sub("", text)


def with_report(
    incidents: Iterable[Incident], stated: StatedFigures, causes: Iterable[ToldCause], time: SearchTime
) -> tuple[Incident, ...]:
    """Return the incidents of an input with what its report says of the device, of their cause and of the model.

    Args:
        incidents: all of one input.
        stated: its first and last lines.
        causes: the words of each cause.
        time: what the searches may take.
    """
    found, lines, told = tuple(stated.completed(i, time) for i in incidents), tuple(stated.lines), tuple(causes)
    if not found or len(found) > MAX_TOLD:
        return found
    if scripted := script_values(lines):
        found = tuple(replace(i, facts=MappingProxyType({**scripted, **i.facts})) for i in found)
    return tuple(_in_report(i, "\n".join(_of_report(i.location.line or 0, lines)), told, time) for i in found)


def _in_report(incident: Incident, text: str, causes: tuple[ToldCause, ...], time: SearchTime) -> Incident:
    if "told_cause" not in incident.facts:
        incident = with_told_cause(incident, text, causes, time)
    if "model" in incident.facts:
        return incident
    model = named_model("\n".join((text, *(evidence.text for evidence in incident.evidence))))
    if model is None:
        return incident
    return replace(incident, facts={**incident.facts, "stated_model": Fact("stated_model", model, "stated")})


def _of_report(line: int, lines: tuple[tuple[int, str], ...]) -> Iterator[str]:
    """Yield the title of an input and the lines above the traceback that ends in a line, without their marks."""
    above = [text for number, text in lines if line - _MOST_ABOVE_LINES <= number < line]
    if len(above) == line - 1 > 1 and _is_title(above[0], above[1]):
        yield above[0]
    own = islice((text for text in reversed(above) if not _is_of_a_traceback(text)), BESIDE_LINES)
    yield _BLOCK_QUOTE.sub("", "\n".join(reversed(tuple(own)))[-_BESIDE_CHARS:])


def _is_of_a_traceback(text: str) -> bool:
    """Return whether nobody wrote a line down; what stands before a process's words is peeled only where it must be."""
    return bool(_OF_A_TRACEBACK.match(text) or _OF_A_TRACEBACK.match(peel(text).text))


def _is_title(first: str, second: str) -> bool:
    """Return whether a text begins with a title: a line with a tracker's marks, or one that stands for itself."""
    return bool(first.strip()) and (not second.strip() or mark_chars(first) > 0)


def with_told_cause(incident: Incident, text: str, causes: Iterable[ToldCause], time: SearchTime) -> Incident:
    """Return an incident with the fact ``told_cause`` where the text around it names one; the first that is found counts."""
    lower = text.lower()
    for told in causes:
        if not any(word in lower for word in told.words):
            continue
        try:
            found = _said(told, text, time)
        except TimeoutError:
            return incident
        if found is not None:
            facts = {**incident.facts, "told_cause": Fact("told_cause", told.cause)}
            begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
            said = text[begin : len(text) if end < 0 else end].strip()[:_SAID_CHARS]
            known = any(said in evidence.text for evidence in incident.evidence)
            return replace(incident, facts=facts, evidence=(*incident.evidence, *(() if known else (Evidence(said),))))
    return incident


def _said(told: ToldCause, text: str, time: SearchTime) -> Any:
    """Return the first match with nothing beside it that says otherwise; None without one."""
    begin = 0
    for _ in range(_MOST_DENIED):
        found = time.search(told.pattern, text, pos=begin)
        if found is None or told.unless is None:
            return found
        near = text[max(0, found.start() - _OTHERWISE_CHARS) : found.end() + _OTHERWISE_CHARS]
        if time.search(told.unless, near) is None:
            return found
        begin = max(found.end(), begin + 1)
    return None
