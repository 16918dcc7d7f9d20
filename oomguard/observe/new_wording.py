"""Failures for memory in words that no signature has: weighed by the lexicon, and told only where nothing else was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from oomguard.incident import Evidence, Incident, Location
from oomguard.observe.account import Account
from oomguard.observe.anchor_index import anchor_index
from oomguard.observe.context import Context
from oomguard.observe.hits import Hit
from oomguard.observe.incidents import ScannedIncident
from oomguard.observe.search_time import SearchTime
from oomguard.observe.source import Line
from oomguard.observe.titled_report import HEAD_LINES, TitledReport
from oomguard.observe.told_cause import beside, with_told_cause
from oomguard.observe.window import Window
from oomguard.rules.lexicon import Lexicon
from oomguard.rules.signature import Quotation
from oomguard.rules.told import ToldCause
from oomguard.settings import SETTING_FACTS

if TYPE_CHECKING:  # loaded where something is weighed: most inputs need none of it
    from oomguard.observe.weighing import Judged, Slow

# So many windows are weighed at most: a document about memory has thousands, a failure is among the first or the last.
FIRST_WINDOWS: Final = 40
LAST_WINDOWS: Final = 80
# So far around a quotation nothing is told in words that no signature has.
QUOTED_LINES: Final = 40
_SETTINGS: Final = frozenset(SETTING_FACTS.values())


@dataclass(slots=True)
class _Waiting:
    """A window that waits to be weighed; it is weighed once, however often a log that still grows is asked."""

    window: Window
    context: Context
    is_weighed: bool = False
    judged: Judged | None = None


class NewWordings:
    """What an input says of failing for memory in words that no signature has; one message of them is told.

    Windows wait until the input is over, or what it says so far is asked; where a signature found a failure, none is weighed.
    """

    def __init__(self, lexicon: Lexicon | None, told: tuple[ToldCause, ...] = ()) -> None:
        self.lexicon = lexicon
        self._inside = None if lexicon is None else anchor_index(lexicon.anchors).inside
        self._told = told
        self._first: list[_Waiting] = []
        self._last: deque[_Waiting] = deque(maxlen=LAST_WINDOWS)
        self._quoted_lines: list[int] = []
        self._title_window: _Waiting | None = None
        self._title_is_quoted = False
        title = lexicon.title if lexicon is not None else None
        self._titled = TitledReport(title)
        self._account = Account(lexicon.account if lexicon is not None else None, title.other_error if title else None)

    def see(self, line: Line) -> None:
        """Take the next line of the input, whatever it holds: the first may be a title, and those below show a run."""
        self._titled.see(line.text, line.number)
        self._account.see(line.text, line.number)

    def may_hold(self, text: str) -> bool:
        """Return whether a line may speak of memory that is short."""
        return self._inside is not None and bool(self._inside(text.lower()))

    def consider(self, window: Window, context: Context, told: Iterable[Hit]) -> None:
        """Take a window in which no signature knew a failure; ``told`` is what signatures knew in it."""
        if window.lines[window.anchor].number == self._titled.line and self._title_window is None:
            self._title_window = _Waiting(window, context)
        if self.lexicon is not None and not any(_is_of_the_engine(hit) for hit in told):
            (self._first if len(self._first) < FIRST_WINDOWS else self._last).append(_Waiting(window, context))

    def quotes(self, line: int, window: Window, context: Context) -> None:
        """Note that a failure is quoted on a line: what stands around it is a document, a prompt or source code."""
        if line == self._titled.line:
            self._title_window, self._title_is_quoted = _Waiting(window, context), True
        else:
            self._quoted_lines.append(line)

    def weighed(
        self, quotations: tuple[Quotation, ...], time: SearchTime, slow: Slow
    ) -> Iterator[tuple[Judged, Window, Context]]:
        """Weigh every window that waits and yield those that hold a phrase."""
        waiting = (*self._first, *self._last)
        if waiting:
            from oomguard.observe.weighing import judged
        for one in waiting:
            if not one.is_weighed:
                assert self.lexicon is not None  # noqa: S101 - just asked
                one.judged, one.is_weighed = judged(self.lexicon, one.window, quotations, time, slow), True
            if one.judged is not None:
                yield one.judged, one.window, one.context

    def surest(self, quotations: tuple[Quotation, ...], time: SearchTime, slow: Slow) -> ScannedIncident | None:
        """Return the failure to tell, the first of those that are equally sure; None where nothing is sure enough."""
        least = 1.0 if self.lexicon is None else self.lexicon.least_ratio
        title = list(self._title(time))
        is_quoted = self._title_is_quoted and not title
        quoted_lines = [*self._quoted_lines, *([self._titled.line or 0] if is_quoted else [])]
        # A title that is told for its report, or told wrong by it, is no line of a log.
        title_line = self._titled.line if title or self._titled.is_denied(time) else None
        told = title + [
            found
            for found in self.weighed(quotations, time, slow)
            if found[0].certainty_ratio >= least
            and (line := _line_of(found[0], found[1])) != title_line
            and not _is_near(quoted_lines, line)
            and not self._account.is_of_a_document(line, time)
        ]
        # One that says what was asked for tells more than the surest one.
        best = max(told, key=lambda f: ("tried_bytes" in f[0].hit.facts, f[0].certainty_ratio), default=None)
        best = best or next(
            (one for one in self._told_in_a_sentence(time) if not _is_near(quoted_lines, _line_of(one[0], one[1]))),
            None,
        )
        if best is None or self.lexicon is None:
            return None
        found = _scanned(*best, self._kind(best[0], best[1], time))
        if any("recovered" in near.facts and near.line >= found.last_line for near in found.near):
            return None
        found.incident = with_told_cause(found.incident, beside(best[1], best[0].hit), self._told, time)
        return found

    def _title(self, time: SearchTime) -> Iterator[tuple[Judged, Window, Context]]:
        """Yield the first line of the input where it is the title of a report and tells what its body does not print."""
        one = self._title_window
        words = self.lexicon.title if self.lexicon is not None else None
        if one is None or words is None or self._account.is_document(time):
            return
        if not self._titled.tells(time, is_report=self._account.is_report(time, below_title=True)):
            return
        begin, end = one.window.anchor_span
        found = time.search(words.phrase, one.window.text, pos=begin, endpos=end)
        if found is not None and self.lexicon is not None:
            from oomguard.observe.weighing import Judged, message_of

            yield (
                Judged(words.certainty_ratio, (), frozenset(), message_of(self.lexicon, one.window, found, time)),
                one.window,
                one.context,
            )

    def _told_in_a_sentence(self, time: SearchTime) -> Iterator[tuple[Judged, Window, Context]]:
        """Yield what sentences of a report tell."""
        words = self.lexicon.account if self.lexicon is not None else None
        if words is None or self.lexicon is None or not (self._first and self._account.is_report(time)):
            return
        from oomguard.observe.weighing import Judged, message_of

        for one in (*self._first, *self._last):
            window = one.window
            number = window.lines[window.anchor].number
            for found in self._account.told_on(window.text, window.anchor_span, number, time):
                hit = message_of(self.lexicon, window, found, time)
                yield Judged(words.certainty_ratio, (), frozenset(), hit), window, one.context

    def _kind(self, found: Judged, window: Window, time: SearchTime) -> str:
        """Return the nearest kind; what the body of a report names counts where its title names none."""
        from oomguard.observe.weighing import nearest_kind

        assert self.lexicon is not None  # noqa: S101 - something was found by it
        return nearest_kind(self.lexicon, window, found.hit, time, "" if found.signs else self._titled.body)


def _is_near(quoted_lines: Iterable[int], line: int) -> bool:
    return any(abs(line - other) <= QUOTED_LINES for other in quoted_lines)


def _is_of_the_engine(hit: Hit) -> bool:
    """Return whether an engine tells of itself, and more than a setting, which a message of a failure may name too."""
    return not hit.wording.near and (not hit.facts or not hit.facts.keys() <= _SETTINGS)


def _line_of(found: Judged, window: Window) -> int:
    return window.lines[found.hit.first].number


def _scanned(found: Judged, window: Window, context: Context, kind: str) -> ScannedIncident:
    hit, line, process = found.hit, window.lines[found.hit.first], window.process
    facts = {name: replace(fact, line=line.number) for name, fact in hit.facts.items()}
    incident = Incident(
        kind=kind,
        message=hit.message,
        framework=context.framework_for(process) or "unknown",
        location=Location(line.number, line.byte, process),
        phase=context.phase_for(process) or "unknown",
        facts={**context.facts_for(process), **facts},
        evidence=(Evidence(line.text.strip()[:400], line.number),),
        start=context.number,
        certainty_ratio=found.certainty_ratio,
    )
    last = window.lines[-1].number + (0 if found.signs else HEAD_LINES)  # a title speaks of all that its report shows
    return ScannedIncident(
        incident,
        context,
        own=facts,
        seen_s=0.0,
        last_line=line.number,
        kinds={kind},
        near=context.beside(line.number, last, process, 0),
        phase_is_told=incident.phase != "unknown",
    )
