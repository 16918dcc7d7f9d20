"""Finding incidents in a stream of lines: anchors first, then patterns on a short window of peeled lines.

The scanner is fed line by line and keeps a bounded state, so the same code reads a saved log and a running child.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from oomguard.errors import SettingError
from oomguard.facts import Fact
from oomguard.incident import Diagnosis, Evidence, Incident, Location, SettingInForce
from oomguard.observe.echo import read_echo, setting_facts
from oomguard.observe.source import Line
from oomguard.observe.text import PlainLine, peel, strip_escapes
from oomguard.rules.load import RuleSet, Signature, Wording, group_value

WINDOW_LINES: Final = 8
WINDOW_CHARS: Final = 6000
MAX_INCIDENTS: Final = 1000
MAX_EVIDENCE_CHARS: Final = 400
SEARCH_TIMEOUT_S: Final = 0.5


@dataclass(slots=True)
class _Window:
    """Lines from one that holds an anchor on, still being collected."""

    first: Line
    plain: PlainLine
    candidates: list[tuple[Signature, Wording]]
    settings: dict[str, SettingInForce] | None
    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    chars: int = 0


@dataclass(frozen=True, slots=True)
class _Hit:
    signature: Signature
    wording: Wording
    span: int
    last_text: int
    message: str
    facts: dict[str, Fact]


@dataclass(slots=True)
class Found:
    """One incident as scanned, and when it was last seen (``time.monotonic`` seconds)."""

    incident: Incident
    seen_s: float


class Scanner:
    """Feed lines with ``push``; ``diagnosis`` closes the stream and returns what was found, in the order of time."""

    def __init__(self, rules: RuleSet) -> None:
        self._anchors = [(w.anchor, s, w) for s in rules.signatures for w in s.wordings]
        self._windows: list[_Window] = []
        self._previous: Line | None = None
        self._found: dict[tuple[object, ...], Found] = {}
        self._context: dict[str, Fact] = {}
        self._context_lines: dict[str, Evidence] = {}
        self._later: dict[str, Fact] = {}
        self._settings: dict[str, SettingInForce] = {}
        self._echo_seen = False
        self._slow: set[str] = set()
        self._taken: dict[str | None, tuple[int, int]] = {}

    def push(self, line: Line) -> None:
        """Take one line."""
        for window in self._windows[:]:
            self._extend(window, line)
        candidates = [(s, w) for anchor, s, w in self._anchors if anchor in line.text]
        if candidates:
            self._open(line, candidates)
        elif self._previous is not None:
            # An anchor may be cut by a wrapped line or by a segment's end: look at the seam.
            glue = "" if line.continued else " "
            seam = self._previous.text[-120:].rstrip() + glue + line.text[:120].lstrip()
            across = [(s, w) for anchor, s, w in self._anchors if anchor in seam and anchor not in self._previous.text]
            if across:
                self._open(self._previous, across)
                self._extend(self._windows[-1], line)
        self._previous = line

    def _open(self, line: Line, candidates: list[tuple[Signature, Wording]]) -> None:
        plain = peel(line.text)
        window = _Window(line, plain, candidates, read_echo(plain.text), [plain.text], [line.number], len(plain.text))
        self._windows.append(window)

    def _extend(self, window: _Window, line: Line) -> None:
        plain = peel(line.text[:WINDOW_CHARS])
        if plain.process == window.plain.process:
            window.texts.append(plain.text if line.continued else "\n" + plain.text)
            window.numbers.append(line.number)
            window.chars += len(plain.text)
        elif plain.process is None and window.plain.process is not None and plain.text.strip():
            window.chars = WINDOW_CHARS  # an unprefixed line after a prefixed one starts something else
        if len(window.texts) >= WINDOW_LINES or window.chars >= WINDOW_CHARS:
            self._windows.remove(window)
            self._close(window)

    def _close(self, window: _Window) -> None:
        text = "".join(window.texts)
        hits = [hit for s, w in window.candidates if (hit := self._match(s, w, text, window.texts)) is not None]
        evidence = Evidence(strip_escapes(window.first.text).strip()[:MAX_EVIDENCE_CHARS], window.first.number)
        for hit in hits:
            if hit.signature.kind is None:
                self._note_context(hit, evidence)
        if window.settings is not None:
            self._settings.update(window.settings)
            self._echo_seen = True
        failures = [hit for hit in hits if hit.signature.kind is not None]
        # A later line of a message that is already taken may hold another wording's anchor: it is the same message.
        taken = self._taken.get(window.plain.process)
        if failures and (taken is None or not taken[0] < window.first.number <= taken[1]):
            best = max(failures, key=lambda hit: hit.span)
            self._taken[window.plain.process] = (window.first.number, window.numbers[best.last_text])
            self._record(best, window, evidence)

    def _match(self, signature: Signature, wording: Wording, text: str, texts: list[str]) -> _Hit | None:
        if wording.anchor in self._slow:
            return None
        try:
            match = wording.pattern.search(text, timeout=SEARCH_TIMEOUT_S)
        except TimeoutError:
            self._slow.add(wording.anchor)
            return None
        if match is None or match.start() >= max(1, len(texts[0])):
            return None  # a match that begins on a later line belongs to that line's own window
        facts: dict[str, Fact] = {}
        for group, captured in match.groupdict().items():
            if captured is None or group.startswith("_"):
                continue
            try:
                fact = group_value(group, captured)
            except SettingError:
                continue
            facts[fact.name] = fact
        for name, value in wording.facts.items():
            facts[name] = Fact(name, value, "printed")
        last, end = 0, len(texts[0])
        while end < match.end():
            last += 1
            end += len(texts[last])
        return _Hit(signature, wording, match.end() - match.start(), last, " ".join(match.group(0).split()), facts)

    def _note_context(self, hit: _Hit, evidence: Evidence) -> None:
        for name, fact in hit.facts.items():
            placed = replace(fact, line=evidence.line)
            if self._found:
                self._later.setdefault(name, placed)
            self._context[name] = placed
            self._context_lines[name] = evidence

    def _record(self, hit: _Hit, window: _Window, evidence: Evidence) -> None:
        key = (hit.signature.kind, *sorted((name, fact.value) for name, fact in hit.facts.items()))
        now = time.monotonic()
        known = self._found.get(key)
        if known is not None:
            known.incident = replace(known.incident, repeated=known.incident.repeated + 1)
            known.seen_s = now
            return
        if len(self._found) >= MAX_INCIDENTS:
            return
        facts = {name: replace(fact, line=window.first.number) for name, fact in hit.facts.items()}
        context = {name: fact for name, fact in self._context.items() if name not in facts}
        lines = dict.fromkeys(self._context_lines[name] for name in context)
        incident = Incident(
            kind=hit.signature.kind or "other",
            message=hit.message,
            framework=hit.signature.framework,
            phase=hit.wording.phase or hit.signature.phase,
            location=Location(window.first.number, window.first.byte, window.plain.process),
            facts={**context, **facts},
            evidence=(evidence, *(line for line in lines if line != evidence)),
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
        while self._windows:
            self._close(self._windows.pop(0))

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
