"""The device's size, and what of it was free, as a program's start or a person states it beside a failure that prints neither."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Final

from oomguard.facts import Fact
from oomguard.incident import Incident
from oomguard.observe.hits import captured
from oomguard.observe.search_time import SearchTime
from oomguard.rules.stated import StatedFigure

# Who reports a failure states the machine at its beginning or its end; what stands amid a long log is not looked at.
FIRST_LINES: Final = 400
LAST_LINES: Final = 400
LINE_CHARS: Final = 600
_STATEMENTS_A_LINE: Final = 8
_SENTENCE_CHARS: Final = 60
# Below a heading the answer stands on a line of its own.
_MOST_ABOVE: Final = 2
_SENTENCE_END: Final = re.compile(r"[.;!?]\s+(?=\S)|\|")
# Two figures are one where they differ by less: 24 GB, 24564MiB, 23.99 GiB.
_SAME_RATIO: Final = 0.03
# No device is as large, and none that is used today as small.
_SIZES: Final = (256 * 2**20, 512 * 2**30)
_TOTAL: Final = "device_total_bytes"
_FREE: Final = "device_free_bytes"
_ASKED: Final = "tried_bytes"
# What the host's memory is short for has no device's size.
_HOSTS: Final = frozenset({"host_oom", "cpu_node_memory"})


class StatedFigures:
    """Keeps an input's first and last lines, and completes a failure by what they state; nothing is looked for before one is found."""

    def __init__(self, figures: tuple[StatedFigure, ...]) -> None:
        self._figures = figures
        self._first: list[tuple[int, str]] = []
        self._last: deque[tuple[int, str]] = deque(maxlen=LAST_LINES)
        self._agreed: dict[tuple[StatedFigure, ...], dict[str, Fact]] = {}  # asked once for all incidents of an input

    def see(self, text: str, number: int) -> None:
        """Take the next line of the input."""
        if self._agreed:
            self._agreed = {}
        if len(self._first) < FIRST_LINES:
            self._first.append((number, text[:LINE_CHARS]))
        else:
            self._last.append((number, text[:LINE_CHARS]))

    @property
    def lines(self) -> Iterator[tuple[int, str]]:
        """The lines that were kept, with their numbers."""
        return chain(self._first, self._last)

    def completed(self, incident: Incident, time: SearchTime) -> Incident:
        """Return an incident with the device's total and free memory where it has none and all statements of it agree."""
        if not self._figures or not incident.is_oom or {_TOTAL, _FREE} <= incident.facts.keys():
            return incident
        kind = incident.kind
        figures = tuple(f for f in self._figures if (kind in f.kinds if f.kinds else kind not in _HOSTS))
        if figures not in self._agreed:
            self._agreed[figures] = self._agreed_on(figures, time)
        found = {name: fact for name, fact in self._agreed[figures].items() if name not in incident.facts}
        facts = {**incident.facts, **found}
        return replace(incident, facts=MappingProxyType(facts)) if found and _may_be(facts) else incident

    def _agreed_on(self, figures: tuple[StatedFigure, ...], time: SearchTime) -> dict[str, Fact]:
        """Return the last statement of each figure of which all agree; a program's count before nominal ones."""
        told: dict[tuple[str, bool], list[Fact]] = {}
        try:
            for figure, fact in self._stated(figures, time):
                told.setdefault((fact.name, figure.nominal), []).append(fact)
        except TimeoutError:
            return {}
        best = {name: told.get((name, False)) or told.get((name, True)) or [] for name in (_TOTAL, _FREE)}
        return {name: facts[-1] for name, facts in best.items() if _all_agree(facts)}

    def _stated(self, figures: tuple[StatedFigure, ...], time: SearchTime) -> Iterator[tuple[StatedFigure, Fact]]:
        above: deque[str] = deque(maxlen=_MOST_ABOVE)
        for number, text in self.lines:
            if not text.strip():
                continue
            lower, below = text.lower(), "\n".join((*above, text)).lower()
            for figure in figures:
                if any(word in (below if figure.lines_above else lower) for word in figure.words):
                    before = list(above)[-figure.lines_above :] if figure.lines_above else []
                    for fact in stated_on(figure, "\n".join((*before, text)), time):
                        yield figure, replace(fact, source="stated", line=number)
            above.append(text)


def stated_on(figure: StatedFigure, text: str, time: SearchTime) -> Iterator[Fact]:
    """Yield what a text of one or a few lines states in the words of one row; raise TimeoutError as a search does."""
    begin = 0
    for _ in range(_STATEMENTS_A_LINE):
        found = time.search(figure.pattern, text, pos=begin)
        if found is None:
            return
        begin = max(found.end(), begin + 1)
        sentence = _SENTENCE_END.split(text[max(0, found.start() - _SENTENCE_CHARS) : found.start()])[-1]
        if figure.unless_behind is not None and time.search(figure.unless_behind, sentence) is not None:
            continue
        for fact in captured(found).values():
            value = float(fact.value) if isinstance(fact.value, (int, float)) else 0.0
            if fact.name != _TOTAL or _SIZES[0] <= value <= _SIZES[1]:
                yield replace(fact, slack=max(fact.slack, _SAME_RATIO * value)) if figure.nominal else fact


def _all_agree(facts: Iterable[Fact]) -> bool:
    values = [float(fact.value) for fact in facts if isinstance(fact.value, (int, float))]
    return bool(values) and max(values) - min(values) <= _SAME_RATIO * max(values)


def _may_be(facts: Mapping[str, Fact]) -> bool:
    """Return whether no more is free, or held, than the device has."""
    known = {name: float(f.value) for name, f in facts.items() if isinstance(f.value, (int, float))}
    total = known.get(_TOTAL)
    return total is None or all(
        known.get(name, 0.0) <= total * (1 + _SAME_RATIO)
        for name in (_FREE, "allocated_bytes", "process_in_use_bytes", "reserved_total_bytes")
    )
