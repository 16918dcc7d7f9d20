"""The cause that somebody names beside a failure that they wrote down: "a stale process still held 51 GiB"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import Evidence, Incident
from oomguard.observe.hits import Hit
from oomguard.observe.search_time import SearchTime
from oomguard.observe.window import Window
from oomguard.rules.told import ToldCause

# Beside so many incidents of an input at most.
MAX_TOLD: Final = 20
# So far before and behind the message somebody speaks of it.
BESIDE_LINES: Final = 12
_BESIDE_CHARS: Final = 1500
_SAID_CHARS: Final = 400
# A paragraph of a document that is set off: its sentences go on behind the marks.
_BLOCK_QUOTE: Final = re.compile(r"(?m)^\s{0,3}>[ \t]?")


def beside(window: Window, hit: Hit) -> str:
    """Return the lines around a message of this window, its first line among them."""
    above = window.above(hit.first).splitlines()[-BESIDE_LINES:]
    below = "".join(window.texts[hit.last + 1 :]).splitlines()[: BESIDE_LINES + 1]
    text = "\n".join(("\n".join(above)[-_BESIDE_CHARS:], window.texts[hit.first], "\n".join(below)[:_BESIDE_CHARS]))
    return _BLOCK_QUOTE.sub("", text)


def with_told_cause(incident: Incident, text: str, causes: Iterable[ToldCause], time: SearchTime) -> Incident:
    """Return an incident with the fact ``told_cause`` where the text around it names one; the first that is found counts."""
    lower = text.lower()
    for told in causes:
        if not any(word in lower for word in told.words):
            continue
        try:
            found = time.search(told.pattern, text)
        except TimeoutError:
            return incident
        if found is not None:
            facts = {**incident.facts, "told_cause": Fact("told_cause", told.cause)}
            begin, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
            said = text[begin : len(text) if end < 0 else end].strip()[:_SAID_CHARS]
            known = any(said in evidence.text for evidence in incident.evidence)
            return replace(incident, facts=facts, evidence=(*incident.evidence, *(() if known else (Evidence(said),))))
    return incident
