"""Find incidents in a stream of lines: anchors first, then patterns on a short window of peeled lines.

The scanner takes line by line and keeps a bounded state: the same code reads a saved log and a running child.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Final

from oomguard.escapes import strip_escapes
from oomguard.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.observe.anchor_index import anchor_index
from oomguard.observe.anchors import Finder, finder
from oomguard.observe.conclude import concluded_incident, concluded_start, standing
from oomguard.observe.context import NEAR_AFTER_LINES, Context
from oomguard.observe.echo import ECHO_ANCHOR
from oomguard.observe.engine_errors import EngineErrors
from oomguard.observe.hits import Hit, best_of, match, quoted
from oomguard.observe.host_tasks import HostTasks
from oomguard.observe.incidents import MAX_INCIDENTS, ScannedIncident, ScannedIncidents
from oomguard.observe.own_reports import OwnReports
from oomguard.observe.search_time import SearchTime
from oomguard.observe.services import Services
from oomguard.observe.skim import Gap
from oomguard.observe.source import Line
from oomguard.observe.text import TRACEBACK, PlainLine, peel, tells_no_failure, words_of
from oomguard.observe.unrecognized import Unrecognized
from oomguard.observe.user_frame import UserFrames
from oomguard.observe.window import Candidate, Window, open_window
from oomguard.rules.load import ENGINE_ENDS, RuleSet
from oomguard.rules.signature import Quotation

LOOK_BACK_LINES: Final = 6
SEAM_LINES: Final = 2
SEAM_CHARS: Final = 120
MAX_EVIDENCE_CHARS: Final = 400
MAX_STARTS: Final = 100
MAX_OPEN: Final = 200
_FINDER_AFTER: Final = 4000  # lines: the search for all anchors at once is worth making ready
_OUT_OF_TIME: Final = "ran out of time and was left out"
__all__ = ["MAX_EVIDENCE_CHARS", "MAX_INCIDENTS", "Scanner", "scan"]


@dataclass(slots=True)
class _Stream:
    """What the scanner remembers of one service's lines on one stream.

    ``last`` are its last lines, ``taken`` the lines that messages of each process took, ``raising`` the process whose record a
    traceback ends, so that lines without a process go on with it.
    """

    name: str
    service: str | None
    last: deque[tuple[int, Line, PlainLine]] = field(default_factory=lambda: deque(maxlen=LOOK_BACK_LINES))
    taken: dict[str | None, tuple[int, int, ScannedIncident | None]] = field(default_factory=dict)
    order: int = 0
    raising: str | None = None

    def attributed(self, plain: PlainLine) -> PlainLine:
        """Return a line with the process of the record that it goes on with: SGLang names a rank once for a whole traceback."""
        if plain.process is not None or plain.is_record:
            self.raising = plain.process if plain.text.rstrip().endswith(f"{TRACEBACK}:") else None
        return plain if self.raising is None else replace(plain, process=self.raising)


def _quote(line: Line) -> Evidence:
    return Evidence(strip_escapes(line.text).strip()[:MAX_EVIDENCE_CHARS], line.number)


class Scanner:
    """Feed lines with ``push``; ``diagnosis`` closes the streams and returns what was found, in the order of time.

    Args:
        rules: what is looked for.
        clock: tells when the line pushed last was printed, as ``time.monotonic`` does for lines that come live.
        unrecognized: whether a failure in a wording that no signature has is reported if nothing else is found.
    """

    def __init__(
        self, rules: RuleSet, clock: Callable[[], float] = time.monotonic, *, unrecognized: bool = False
    ) -> None:
        self._rules = rules
        self._anchors: dict[str, list[tuple[int, Candidate]]] = {}  # in the order of the files
        for number, pair in enumerate((s, w) for s in rules.signatures for w in s.wordings):
            self._anchors.setdefault(pair[1].anchor, []).append((number, pair))
        self._inside = anchor_index(rules.anchors).inside
        self._quotations = rules.quotations
        self._streams: dict[tuple[str, str | None], _Stream] = {}
        self._services: dict[str, Services] = {}
        self._open: list[tuple[_Stream, Window]] = []
        self.found = ScannedIncidents(clock)
        self._contexts = [Context(1)]  # all starts, in the order of time
        self._latest: dict[str | None, Context] = {None: self._contexts[0]}  # the last start of each service
        self._own = OwnReports()
        self._tasks = HostTasks()
        self._frames = UserFrames()
        self._errors, self._clock = EngineErrors(), clock
        self._finder: Finder | None = None
        self._unrecognized, self._is_unrecognized_taken = Unrecognized(), unrecognized
        self._looked = self._repeats = 0
        self._time = SearchTime()
        self._left_out: dict[tuple[str, ...], str] = {}  # what is told of each pattern that ran out of time

    def _context_of(self, service: str | None) -> Context:
        """Return the last start of a service; what was printed before any service was named is the first one's."""
        if service not in self._latest:
            is_first = len(self._latest) == 1
            if not is_first and len(self._contexts) < MAX_STARTS:
                self._contexts.append(Context(len(self._contexts) + 1))
            self._latest[service] = self._latest[None] if is_first else self._contexts[-1]
            self._latest[service].service = service
        return self._latest[service]

    def push(self, line: Line | Gap, stream: str = "") -> None:
        """Take the next line of a stream.

        Args:
            line: the line, or a ``Gap`` where lines were left out: what comes next does not continue what came before.
            stream: which stream it comes from; standard output and error may take turns.
        """
        if isinstance(line, Gap):
            for owner, window in self._open:
                window.complete = window.complete or owner.name == stream
            self._settle()
            for each in self._streams.values():
                if each.name == stream:
                    each.last.clear()
                    each.raising = None
            self._unrecognized.leave_out()
            self._errors.leave_out()
            self._looked = max(self._looked, _FINDER_AFTER)  # a finder has left lines out: it is ready
            self._repeats += line.repeats
            return
        plain = peel(line.text)
        service = self._services.setdefault(stream, Services()).of(plain)
        state = self._streams.get((stream, service))
        if state is None:
            state = self._streams[stream, service] = _Stream(stream, service)
        if self._own.takes(line, plain, stream):
            return
        plain = state.attributed(plain)
        state.order += 1
        self._frames.see(plain.text, plain.process, line.number)
        for owner, window in self._open:
            if owner is state:
                window.extend(line, plain, state.order)
        self._settle()
        text = strip_escapes(line.text) if "\x1b" in line.text else line.text
        self._unrecognized.see(text)
        anchors = self._inside(text) if self._may_hold(text) else []
        if anchors or self._tasks.is_open:
            self._tasks.see(text, line.number)
        heads = [one for one in anchors if one in ENGINE_ENDS]
        self._errors.see(line, plain, heads, self._context_of(service), self._clock() if heads else 0.0)
        across = self._across_the_seam(state, line, text)
        if across:
            # The message begins on the lines before: the window opens there and takes this line as its next.
            window = open_window(list(state.last), across)
            self._open.append((state, window))
            window.extend(line, plain, state.order)
        state.last.append((state.order, line, plain))
        if anchors:
            self._open.append((state, open_window(list(state.last), self._candidates(anchors))))

    def _may_hold(self, text: str) -> bool:
        """Return whether a text may hold an anchor; in a long input one search for all of them tells most lines apart."""
        self._looked += 1
        if self._looked < _FINDER_AFTER:
            return True
        self._finder = self._finder or finder(self._rules.anchors)
        return self._finder.holds(text.encode("utf-8", "surrogatepass"))

    def _across_the_seam(self, state: _Stream, line: Line, text: str) -> list[Candidate]:
        """Return the wordings whose anchor is cut by a wrapped line or by a segment's end."""
        if not state.last or (not line.continued and tells_no_failure(text)):
            return []  # a record of its own that tells no failure: no message was wrapped onto it
        before = [previous.text for _, previous, _ in state.last][-SEAM_LINES:]
        head = text[:SEAM_CHARS].lstrip(" \t#>|*")
        glue = "" if line.continued else " "
        seam = words_of(" ".join(part[-SEAM_CHARS:].strip() for part in before)) + glue + words_of(head)
        if not self._may_hold(seam):
            return []
        words, inside = words_of(text), "\0".join(map(words_of, before))
        return self._candidates(one for one in self._inside(seam) if one not in words and one not in inside)

    def _candidates(self, anchors: Iterable[str]) -> list[Candidate]:
        return [
            candidate
            for _, candidate in sorted((c for a in anchors for c in self._anchors.get(a, ())), key=itemgetter(0))
        ]

    def _settle(self) -> None:
        """Close the windows that are complete, in the order in which they came over all streams.

        A start must not be read before the failure it follows, nor a failure on one stream before the start that
        another stream announced. A silent stream holds up the others only until ``MAX_OPEN`` windows wait.
        """
        while self._open and (self._open[0][1].complete or len(self._open) > MAX_OPEN):
            self._close(*self._open.pop(0))

    def _close(self, state: _Stream, window: Window) -> None:
        context = self._context_of(state.service)
        hits = [hit for candidate in window.candidates if (hit := self._match(candidate, window))]
        told = [hit for hit in hits if hit.kind is None]
        for hit in told:
            context = self._note(hit, window, context)
        for hit in (hit for hit in told if hit.wording.anchor == ECHO_ANCHOR):
            context.note_echo(window.text[hit.position :])
        failures = [hit for hit in hits if hit.kind is not None]
        if not failures:
            self._unrecognized.consider(window, context, lambda hit: self._is_quoted(hit, window))
            return
        best = best_of(failures)
        first, last = window.orders[best.first], window.orders[best.last]
        # A line of a message already taken may hold another wording's anchor: it is the same message.
        taken = state.taken.get(window.process)
        if taken is not None and taken[0] <= first <= taken[1]:
            if taken[2] is not None:
                taken[2].say_more(best)
            return
        line = window.lines[best.first]
        if self._is_quoted(best, window):
            return
        evidence, location = _quote(line), Location(line.number, line.byte, window.process)
        found = self.found.take(best, location, evidence, context)
        state.taken[window.process] = (first, last, found)
        if found is not None:
            self._attach(found, window.lines[best.last].number)

    def _match(self, candidate: Candidate, window: Window) -> Hit | None:
        signature, wording = candidate
        name = (signature.path, wording.key, wording.anchor)
        if name in self._left_out:
            return None
        try:
            return match(signature, wording, window, self._time)
        except TimeoutError:
            place = ": ".join(filter(None, (signature.path, wording.key)))
            self._left_out[name] = f"{place}: a pattern for {wording.anchor!r} {_OUT_OF_TIME}"
            return None

    def _is_quoted(self, hit: Hit, window: Window) -> bool:
        return quoted(hit, window, self._quotations, self._time, self._leave_out) is not None

    def _leave_out(self, slow: Quotation) -> None:
        self._quotations = tuple(other for other in self._quotations if other is not slow)
        self._left_out["quotation", slow.name, slow.part] = f"quotation {slow.name!r}: its pattern {_OUT_OF_TIME}"

    def _note(self, hit: Hit, window: Window, context: Context) -> Context:
        """Take a line that tells no failure; return the start that it belongs to: ``context``, or the one that it begins."""
        begun = context.begun_by(hit, window.process, window.text[hit.position :])
        if begun is not None and len(self._contexts) < MAX_STARTS:
            begun.number = len(self._contexts) + 1
            self._contexts.append(begun)
            for service, latest in self._latest.items():
                if latest is context:
                    self._latest[service] = begun
            context = begun
        evidence = _quote(window.lines[hit.first])
        near = context.note(hit, window.process, evidence)
        if near is None:
            return context
        for found in self.found.all[-3:]:
            # The kernel's report of a kill is one message of many lines, whose figures are amid it.
            begin = found.incident.location.line if found.incident.kind == "host_oom" else found.last_line
            is_near = (begin or 0) <= near.line <= found.last_line + NEAR_AFTER_LINES
            if found.context is context and is_near and near.of(found.process):
                found.near.append(near)
        return context

    def _attach(self, found: ScannedIncident, last_line: int) -> None:
        """Add to an incident what is known at this moment of the process that failed."""
        context, process = found.context, found.process
        before = [f.last_line for f in self.found.all[:-1] if f.context is context and f.process == process]
        found.last_line = last_line
        found.near = context.beside(found.incident.location.line or 0, last_line, process, max(before, default=0))
        known = {k: v for k, v in context.facts_for(process).items() if k not in found.incident.facts}
        quotes = (context.evidence_for(process, name) for name in known)
        lines = dict.fromkeys(q for q in quotes if q is not None and q not in found.incident.evidence)
        found.incident = replace(
            found.incident,
            facts={**known, **self._frames.facts(process, last_line), **found.incident.facts},
            evidence=(*found.incident.evidence, *lines),
            phase=found.incident.phase
            if found.incident.phase != "unknown"
            else context.phase_for(process) or "unknown",
        )

    @property
    def measured(self) -> dict[str, float]:
        """What the run measured of itself: the figures outside failures, as last printed, by fact and in its unit."""
        return self._contexts[-1].numbers()

    def death(self) -> Incident | None:
        """Close the streams and return the death of the engine that started last, None if it did not die.

        A death does not count if a later start came to serve.
        """
        self.flush()
        if len(self._contexts) >= MAX_STARTS:
            return None  # later starts are not told apart
        last = next((c for c in reversed(self._contexts) if c.ending.death is not None or c.stands), self._contexts[-1])
        return last.death

    def flush(self) -> None:
        """Close all open windows: what follows is not part of them."""
        while self._open:
            self._close(*self._open.pop(0))

    def diagnosis(
        self, source: str = "", *, given: Mapping[str, SettingInForce] | None = None, newer_than_s: float | None = None
    ) -> Diagnosis:
        """Close the streams and return the incidents and starts found so far.

        Args:
            source: the path as the user gave it.
            given: settings that the caller knows; they win over those that the engine echoed.
            newer_than_s: leave out incidents last seen before this ``time.monotonic``, in seconds.
        """
        self.flush()
        found = [f for f in self.found.all if newer_than_s is None or f.seen_s >= newer_than_s]
        kept = standing(found)
        notes = (*self._time.notes, *self._left_out.values())
        if self._is_unrecognized_taken and not any(f.incident.is_oom for f in self.found.all):
            found_so = self._unrecognized.failure()
            kept = kept if found_so is None else [*(f for f in kept if f.incident.kind != "engine_dead"), found_so]
            notes += () if kept else self._unrecognized.notes
        kept = sorted([*kept, *self._errors.deaths(self.found.all, newer_than_s)], key=_line)
        starts = tuple(start for c in self._contexts if (start := concluded_start(c, given)) is not None)
        notes += () if kept else self._own.note
        if self._repeats and kept:
            notes += (f"{self._repeats:,} more lines repeat the same messages: they were counted, not read",)
        several = len({context.service for context in self._contexts}) > 1
        incidents = tuple(
            concluded_incident(f, given, self._tasks, alone=len(kept) == 1, names_service=several) for f in kept
        )
        return Diagnosis(source, self._with_causes(kept, incidents), notes, starts)

    def _with_causes(self, kept: Sequence[ScannedIncident], incidents: Sequence[Incident]) -> tuple[Incident, ...]:
        """Return the incidents, each end of an engine with the exception or signal that caused it."""
        afters = [0, *(found.last_line for found in kept)][: len(kept)]
        befores: list[int | None] = [*map(_line, kept[1:]), None][: len(kept)]
        return tuple(
            self._errors.explained(one, found.context.service, after, before) if one.kind == "engine_dead" else one
            for one, found, after, before in zip(incidents, kept, afters, befores, strict=True)
        )


def _line(found: ScannedIncident) -> int:
    return found.incident.location.line or 0


def scan(
    lines: Iterable[Line | Gap],
    rules: RuleSet,
    source: str = "",
    *,
    given: Mapping[str, SettingInForce] | None = None,
    unrecognized: bool = False,
) -> Diagnosis:
    """Scan a finite stream of lines; the arguments are those of ``Scanner`` and ``Scanner.diagnosis``."""
    scanner = Scanner(rules, unrecognized=unrecognized)
    for line in lines:
        scanner.push(line)
    return scanner.diagnosis(source, given=given)
