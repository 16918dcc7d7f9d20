"""Finding incidents in a stream of lines: anchors first, then patterns on a short window of peeled lines.

The scanner is fed line by line and keeps a bounded state, so the same code reads a saved log and a running child.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from oomguard.errors import SettingError
from oomguard.escapes import strip_escapes
from oomguard.facts import Fact
from oomguard.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.observe.echo import read_echo, setting_facts
from oomguard.observe.source import MAX_SEGMENT_CHARS, Line
from oomguard.observe.text import PlainLine, peel
from oomguard.rules.load import RuleSet, Signature, Wording
from oomguard.rules.pattern import group_value

WINDOW_LINES: Final = 8
WINDOW_CHARS: Final = 6000
LOOK_BACK_LINES: Final = 3
SEAM_CHARS: Final = 120
MAX_INCIDENTS: Final = 1000
MAX_EVIDENCE_CHARS: Final = 400
SEARCH_TIMEOUT_S: Final = 0.5


@dataclass(slots=True)
class _Window:
    """The lines around one that holds an anchor, still being collected."""

    candidates: list[tuple[Signature, Wording]]
    process: str | None
    anchor: int
    lines: list[Line]
    orders: list[int]
    texts: list[str]
    full: bool = False

    @property
    def anchor_span(self) -> tuple[int, int]:
        """Where the anchor's line begins and ends in the joined text."""
        start = sum(map(len, self.texts[: self.anchor]))
        return start, start + len(self.texts[self.anchor])

    def index(self, position: int) -> int:
        """Which of the lines holds a position of the joined text."""
        end = 0
        for i, text in enumerate(self.texts):
            end += len(text)
            if position < end:
                return i
        return len(self.texts) - 1


@dataclass(slots=True)
class _Stream:
    """What the scanner remembers of one stream: its open windows and its last lines."""

    windows: list[_Window] = field(default_factory=list)
    last: deque[tuple[int, Line]] = field(default_factory=lambda: deque(maxlen=LOOK_BACK_LINES))
    taken: dict[str | None, tuple[int, int]] = field(default_factory=dict)
    order: int = 0


@dataclass(frozen=True, slots=True)
class _Hit:
    signature: Signature
    wording: Wording
    first: int
    last: int
    span: int
    message: str
    facts: dict[str, Fact]


@dataclass(slots=True)
class Found:
    """One incident as scanned, and when it was last seen (``time.monotonic`` seconds)."""

    incident: Incident
    seen_s: float


def _quote(line: Line) -> Evidence:
    return Evidence(strip_escapes(line.text).strip()[:MAX_EVIDENCE_CHARS], line.number)


class Scanner:
    """Feed lines with ``push``; ``diagnosis`` closes the stream and returns what was found, in the order of time."""

    def __init__(self, rules: RuleSet) -> None:
        self._anchors = [(w.anchor, s, w) for s in rules.signatures for w in s.wordings]
        self._streams: dict[str, _Stream] = {}
        self._found: dict[tuple[object, ...], Found] = {}
        self._context: dict[str, Fact] = {}
        self._context_lines: dict[str, Evidence] = {}
        self._later: dict[str, Fact] = {}
        self._settings: dict[str, SettingInForce] = {}
        self._echo_seen = False
        self._slow: set[str] = set()

    def push(self, line: Line, stream: str = "") -> None:
        """Take one line; lines of several streams (standard output and error) may come in turn."""
        state = self._streams.setdefault(stream, _Stream())
        state.order += 1
        text = strip_escapes(line.text) if "\x1b" in line.text else line.text
        for window in state.windows[:]:
            self._extend(state, window, line)
        candidates = [(s, w) for anchor, s, w in self._anchors if anchor in text]
        if state.last:
            # An anchor may be cut by a wrapped line or by a segment's end: look at the seam.
            before = state.last[-1][1].text
            seam = before[-SEAM_CHARS:].rstrip() + ("" if line.continued else " ") + text[:SEAM_CHARS].lstrip()
            across = [
                (s, w)
                for anchor, s, w in self._anchors
                if anchor in seam and anchor not in before and anchor not in text
            ]
            if across:
                self._open(state, list(state.last), across)
                self._extend(state, state.windows[-1], line)
        state.last.append((state.order, line))
        if candidates:
            self._open(state, list(state.last), candidates)

    def _open(self, state: _Stream, lines: list[tuple[int, Line]], candidates: list[tuple[Signature, Wording]]) -> None:
        """Open a window on the last of ``lines``; those before it belong to it where the same process wrote them."""
        plain = [(order, line, peel(line.text[:MAX_SEGMENT_CHARS])) for order, line in lines]
        process = plain[-1][2].process
        same = [row for row in plain if row[2].process == process]
        texts = [("" if line.continued or i == 0 else "\n") + text.text for i, (_, line, text) in enumerate(same)]
        window = _Window(candidates, process, len(same) - 1, [r[1] for r in same], [r[0] for r in same], texts)
        state.windows.append(window)

    def _extend(self, state: _Stream, window: _Window, line: Line) -> None:
        plain: PlainLine = peel(line.text[:WINDOW_CHARS])
        if plain.process == window.process:
            window.texts.append(plain.text if line.continued else "\n" + plain.text)
            window.lines.append(line)
            window.orders.append(state.order)
        elif plain.process is None and plain.text.strip():
            window.full = True  # an unprefixed line after a prefixed one starts something else
        own = window.texts[window.anchor + 1 :]
        if window.full or len(own) >= WINDOW_LINES or sum(map(len, own)) >= WINDOW_CHARS:
            state.windows.remove(window)
            self._close(state, window)

    def _close(self, state: _Stream, window: _Window) -> None:
        text = "".join(window.texts)
        hits = [hit for s, w in window.candidates if (hit := self._match(s, w, text, window)) is not None]
        for hit in hits:
            if hit.signature.kind is None:
                self._note_context(hit, _quote(window.lines[hit.first]))
        echo = read_echo(text)
        if echo is not None:
            self._settings.update(echo.settings)
            self._echo_seen = self._echo_seen or echo.complete
        failures = [hit for hit in hits if hit.signature.kind is not None]
        if not failures:
            return
        best = max(failures, key=lambda hit: hit.span)
        first, last = window.orders[best.first], window.orders[best.last]
        # A line of a message that is already taken may hold another wording's anchor: it is the same message.
        taken = state.taken.get(window.process)
        if taken is None or not taken[0] <= first <= taken[1]:
            state.taken[window.process] = (first, last)
            self._record(best, window.lines[best.first], window.process)

    def _match(self, signature: Signature, wording: Wording, text: str, window: _Window) -> _Hit | None:
        if wording.anchor in self._slow:
            return None
        begin, end = window.anchor_span
        try:
            match = next((m for m in wording.pattern.finditer(text, timeout=SEARCH_TIMEOUT_S) if m.end() > begin), None)
        except TimeoutError:
            self._slow.add(wording.anchor)
            return None
        if match is None or match.start() >= max(1, end):
            return None  # what does not touch the anchor's line belongs to another window
        facts: dict[str, Fact] = {}
        for group, captured in match.capturesdict().items():
            if not captured or group.startswith("_"):
                continue
            try:
                parts = [group_value(group, part) for part in captured]
            except SettingError:
                continue
            fact = parts[0]
            if len(parts) > 1 and fact.name.endswith("_bytes"):  # "Process 1 has …. Process 2 has …."
                fact = replace(fact, value=sum(int(p.value) for p in parts), slack=sum(p.slack for p in parts))
            facts[fact.name] = fact
        for name, value in wording.facts.items():
            facts[name] = Fact(name, value, "printed")
        first, last = window.index(match.start()), window.index(match.end() - 1)
        return _Hit(
            signature, wording, first, last, match.end() - match.start(), " ".join(match.group(0).split()), facts
        )

    def _note_context(self, hit: _Hit, evidence: Evidence) -> None:
        for name, fact in hit.facts.items():
            placed = replace(fact, line=evidence.line)
            if self._found:
                self._later.setdefault(name, placed)
            self._context[name] = placed
            self._context_lines[name] = evidence

    def _record(self, hit: _Hit, line: Line, process: str | None) -> None:
        evidence = _quote(line)
        key = (hit.signature.kind, *sorted((name, fact.value) for name, fact in hit.facts.items()))
        now = time.monotonic()
        known = self._found.get(key)
        if known is not None:
            known.incident = replace(known.incident, repeated=known.incident.repeated + 1)
            known.seen_s = now
            return
        if len(self._found) >= MAX_INCIDENTS:
            return
        facts = {name: replace(fact, line=line.number) for name, fact in hit.facts.items()}
        context = {name: fact for name, fact in self._context.items() if name not in facts}
        lines = dict.fromkeys(self._context_lines[name] for name in context)
        incident = Incident(
            kind=hit.signature.kind or "other",
            message=hit.message,
            framework=hit.signature.framework,
            phase=hit.wording.phase or hit.signature.phase,
            location=Location(line.number, line.byte, process),
            facts={**context, **facts},
            evidence=(evidence, *(quoted for quoted in lines if quoted != evidence)),
        )
        self._found[key] = Found(incident, now)

    @property
    def measured(self) -> dict[str, float]:
        """The numbers of the lines that are no failure, as last printed: what the run itself measured."""
        numbers = {name: fact.value for name, fact in self._context.items()}
        return {
            name: value
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def flush(self) -> None:
        """Close the windows that are still open: what follows is not part of them."""
        for state in self._streams.values():
            while state.windows:
                self._close(state, state.windows.pop(0))

    def diagnosis(
        self, source: str = "", *, given: Mapping[str, SettingInForce] | None = None, newer_than_s: float | None = None
    ) -> Diagnosis:
        """Close the stream; ``given`` settings win over echoed ones, ``newer_than_s`` drops what was last seen before."""
        self.flush()
        settings = {**self._settings, **(given or {})}
        # A command line lists all that the user set as surely as the engine's own echo does.
        complete = self._echo_seen or any(s.source == "command" for s in settings.values())
        incidents = [
            self._finish(found.incident, settings, complete=complete)
            for found in self._found.values()
            if newer_than_s is None or found.seen_s >= newer_than_s
        ]
        # A wrapper ("See root cause above") is no incident of its own beside its cause.
        if any(incident.kind != "engine_dead" for incident in incidents):
            incidents = [incident for incident in incidents if incident.kind != "engine_dead"]
        notes = tuple(f"a pattern for {anchor!r} ran out of time and was left out" for anchor in sorted(self._slow))
        return Diagnosis(source, tuple(incidents), notes)

    def _finish(self, incident: Incident, settings: Mapping[str, SettingInForce], *, complete: bool) -> Incident:
        # What the message itself says wins, then what the caller gave, the engine's echo, and loose text last.
        own = {name: fact for name, fact in incident.facts.items() if fact.line == incident.location.line}
        facts = {**self._later, **incident.facts, **setting_facts(settings, complete=complete), **own}
        version = facts.get("framework_version")
        return replace(
            incident,
            facts=MappingProxyType(facts),
            settings=MappingProxyType(dict(settings)),
            settings_complete=complete,
            framework_version=str(version.value) if version else incident.framework_version,
        )


def scan(
    lines: Iterable[Line], rules: RuleSet, source: str = "", *, given: Mapping[str, SettingInForce] | None = None
) -> Diagnosis:
    """Scan a finite stream of lines; see ``Scanner``."""
    scanner = Scanner(rules)
    for line in lines:
        scanner.push(line)
    return scanner.diagnosis(source, given=given)
